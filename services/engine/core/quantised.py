"""Weight-only quantisation of a draft model: int8 with a scale per output, int4 with one per 32 inputs.

A quantised model is a model of its own: its module gets the dequantised values, so that the engine can be
compared with the module's own forward as strictly as for any other model. Rounding is to the nearest, without
calibration data. With int4 the embedding and the head stay int8: their errors change the draws most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from services.engine.core.model import LoadedModel

__all__ = ["GROUP", "QuantisedMatrix", "quantise", "quantise_model"]

GROUP = 32
"""Inputs that share a scale in int4, as in llama.cpp's Q4_0."""

# Of a group's scale, over that by which its largest weight is exact: the best one is chosen.
_INT4_CANDIDATES = tuple(1.0 - step / 40 for step in range(13))


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix in integers.

    Attributes:
        values: int8 [outputs, inputs], those of int4 in [-8, 7].
        scales: float32 [outputs, 1] with int8, [outputs, groups of `GROUP` inputs] with int4.
        bits: 8 or 4.
    """

    values: Tensor
    scales: Tensor
    bits: int

    def dequantised(self) -> Tensor:
        """Return the weights that it stands for: float32 [outputs, inputs]."""
        inputs = self.values.shape[1]
        scales = self.scales if self.bits == 8 else self.scales.repeat_interleave(GROUP, 1)[:, :inputs]
        return self.values * scales


def quantise(weight: Tensor, bits: int) -> QuantisedMatrix:
    """Round a matrix [outputs, inputs] to integers.

    Args:
        weight: The matrix.
        bits: 8 or 4.
    """
    weight = weight.float()
    if bits == 8:
        scales = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
        return QuantisedMatrix((weight / scales).round().to(torch.int8), scales, 8)
    outputs, inputs = weight.shape
    groups = nn.functional.pad(weight, (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    place = groups.abs().argmax(2, keepdim=True)
    # With its sign, so that the largest weight becomes -8, the integer that has no counterpart.
    base = groups.gather(2, place) / -8
    best = torch.full_like(base, torch.inf)
    scales, values = base, groups
    for candidate in _INT4_CANDIDATES:
        tried = _nonzero((base * candidate).bfloat16().float())  # the kernel holds scales in bfloat16
        rounded = (groups / tried).round().clamp(-8, 7)
        error = (rounded * tried - groups).square().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, tried, scales)
        values = torch.where(better, rounded, values)
    flat = values.to(torch.int8).flatten(1)[:, :inputs].contiguous()
    return QuantisedMatrix(flat, scales[:, :, 0].contiguous(), 4)


@torch.no_grad()
def quantise_model(loaded: LoadedModel, weights: str) -> Mapping[int, QuantisedMatrix]:
    """Quantise the matrices of a Llama-like model; its module gets the dequantised ones, in place.

    Args:
        loaded: The model, in float32 on a CPU.
        weights: "int8" or "int4".

    Returns:
        The matrices by the address of the module's weight (`Tensor.data_ptr`): a tied one is there once.
    """
    ends = (loaded.llama.get_input_embeddings(), loaded.llama.get_output_embeddings())
    quantised: dict[int, QuantisedMatrix] = {}
    for module in loaded.module.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.data_ptr() not in quantised:
            # The kernel reads up to four inputs of int4 at once.
            is_int4 = weights == "int4" and module not in ends and module.weight.shape[1] % 4 == 0
            matrix = quantise(module.weight, 4 if is_int4 else 8)
            module.weight.copy_(matrix.dequantised())
            quantised[module.weight.data_ptr()] = matrix
    return quantised


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
