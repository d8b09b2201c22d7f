"""Weight-only quantisation of a draft model: int8 with a scale per output, int4 with a scale and an offset
per output and 32 inputs.

A quantised model is a model of its own: its module gets the dequantised values, so that the engine can be
compared with the module's own forward as strictly as for any other model. Rounding is to the nearest, without
calibration data. With int4 the embedding and the head stay int8: their errors change the draws most.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from services.engine.core.model import LoadedModel, embeddings

GROUP = 32
"""Inputs that share a scale and an offset in int4, as in llama.cpp's Q4_1."""

# The range of a group's integers over that of its weights, at either end: the best pair is chosen.
_INT4_SHARES = (1.0, 0.9, 0.8)


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix in integers.

    Attributes:
        values: uint8 [outputs, inputs] in [0, 15] with int4, else int8.
        scales: float32: [outputs, 1] with int8, [outputs, groups of `GROUP` inputs] with int4.
        offsets: Weight of the integer 0, as `scales`; None with int8.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def dequantised(self) -> Tensor:
        """Return the weights that it stands for: float32 [outputs, inputs]."""
        if self.offsets is None:
            return self.values * self.scales
        inputs = self.values.shape[1]
        scales, offsets = (x.repeat_interleave(GROUP, 1)[:, :inputs] for x in (self.scales, self.offsets))
        return self.values * scales + offsets

    def __getitem__(self, rows: slice) -> QuantisedMatrix:
        """Return some of the outputs."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return QuantisedMatrix(self.values[rows], self.scales[rows], offsets)


def concatenate(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix:
    """Return the outputs of several matrices of the same inputs and kind as one matrix."""
    values, scales = (
        torch.cat(x) for x in ([part.values for part in parts], [part.scales for part in parts])
    )
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantisedMatrix(values, scales, torch.cat(offsets) if offsets else None)


def quantise_int8(weight: Tensor) -> QuantisedMatrix:
    """Round a matrix [outputs, inputs] to int8, with a scale per output."""
    weight = weight.float()
    scales = _nonzero(weight.abs().amax(1, keepdim=True) / 127)
    return QuantisedMatrix((weight / scales).round().to(torch.int8), scales)


def quantise_int4(weight: Tensor) -> QuantisedMatrix:
    """Round a matrix [outputs, inputs] to four bits, with a scale and an offset per output and group."""
    outputs, inputs = weight.shape
    groups = nn.functional.pad(weight.float(), (0, -inputs % GROUP)).view(outputs, -1, GROUP)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    least = torch.full_like(low, torch.inf)
    scales, offsets, values = low, low, groups
    for below, above in product(_INT4_SHARES, repeat=2):
        # The kernel holds scales and offsets in bfloat16.
        scale = _nonzero(((high * above - low * below) / 15).bfloat16().float())
        offset = (low * below).bfloat16().float()
        rounded = ((groups - offset) / scale).round().clamp(0, 15)
        error = (rounded * scale + offset - groups).square().sum(2, keepdim=True)
        is_better = error < least
        least = torch.where(is_better, error, least)
        scales, offsets = torch.where(is_better, scale, scales), torch.where(is_better, offset, offsets)
        values = torch.where(is_better, rounded, values)
    flat = values.to(torch.uint8).flatten(1)[:, :inputs].contiguous()
    return QuantisedMatrix(flat, scales.squeeze(2), offsets.squeeze(2))


@torch.no_grad()
def quantise_model(loaded: LoadedModel, weights: str) -> Mapping[int, QuantisedMatrix]:
    """Quantise the matrices of a Llama-like model; its module gets the dequantised ones, in place.

    Args:
        loaded: The model, in float32 on a CPU.
        weights: "int8" or "int4".

    Returns:
        The matrices by the address of the module's weight (`Tensor.data_ptr`): a tied one is there once.
    """
    quantised: dict[int, QuantisedMatrix] = {}
    for weight, matrix in quantised_matrices(loaded.module, embeddings(loaded.module), weights):
        weight.copy_(matrix.dequantised())
        quantised[weight.data_ptr()] = matrix
    return quantised


def quantised_matrices(
    module: nn.Module, ends: Collection[nn.Module], weights: str
) -> Iterator[tuple[Tensor, QuantisedMatrix]]:
    """Yield each matrix of a module with its quantised form, a tied one once.

    Args:
        ends: Its embedding and its output, which are int8 at least.
        weights: "int8" or "int4".
    """
    seen = set[int]()
    for part in module.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)) and part.weight.data_ptr() not in seen:
            seen.add(part.weight.data_ptr())
            # The kernel reads up to four inputs of int4 at once.
            is_int4 = weights == "int4" and part not in ends and part.weight.shape[1] % 4 == 0
            yield part.weight, (quantise_int4 if is_int4 else quantise_int8)(part.weight)


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales == 0, 1.0, scales)
