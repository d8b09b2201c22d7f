"""Weight-only quantisation of a draft model: int8 with a scale per output.

A quantised model is a model of its own: its module gets the dequantised values, so that the engine can be
compared with the module's own forward as strictly as for any other model. Rounding is to the nearest, without
calibration data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class QuantisedMatrix:
    values: Tensor  # int8 [outputs, inputs]
    scales: Tensor  # float32 [outputs, 1]

    def dequantised(self) -> Tensor:
        """Return the weights that it stands for: float32 [outputs, inputs]."""
        return self.values * self.scales

    def __getitem__(self, rows: slice) -> QuantisedMatrix:
        return QuantisedMatrix(self.values[rows], self.scales[rows])


def concatenate(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Return the outputs of several matrices of the same inputs as one matrix."""
    values = torch.cat([part.values for part in parts])
    return QuantisedMatrix(values, torch.cat([part.scales for part in parts]))


def quantise(weight: Tensor) -> QuantisedMatrix:
    """Round a matrix [outputs, inputs] to int8, with a scale per output."""
    weight = weight.float()
    scales = weight.abs().amax(1, keepdim=True) / 127
    scales = torch.where(scales == 0, 1.0, scales)
    return QuantisedMatrix((weight / scales).round().to(torch.int8), scales)


@torch.no_grad()
def quantise_model(module: nn.Module) -> Mapping[int, QuantisedMatrix]:
    """Return the matrices of a float32 model on a CPU, which get the dequantised values in place."""
    quantised = quantised_matrices(module)
    for weight in module.parameters():
        if (matrix := quantised.get(weight.data_ptr())) is not None:
            weight.copy_(matrix.dequantised())
    return quantised


def quantised_matrices(module: nn.Module) -> Mapping[int, QuantisedMatrix]:
    """Return a module's matrices by the address of the weight (`Tensor.data_ptr`), a tied one once."""
    weights = (part.weight for part in module.modules() if isinstance(part, (nn.Linear, nn.Embedding)))
    return {address: quantise(weight) for address, weight in {w.data_ptr(): w for w in weights}.items()}
