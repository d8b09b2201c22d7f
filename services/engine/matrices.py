"""Linear maps laid out for one core: few bytes per weight, and a cost that does not jump with the rows.

A decoding step reads every weight once, so on a CPU it is bound by memory. Nearly all published weights are
bfloat16: a float16 number has more mantissa bits, so after scaling by a power of two such weights fit in
float16 without loss, at half the bytes of float32. FBGEMM multiplies float32 rows with float16 weights in
float32 arithmetic, so the products are those of the float32 weights. Weights that do not fit stay float32,
in a plain layout for one row and in oneDNN's blocked one for several.
"""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["FullMatrix", "HalfMatrix", "Matrix", "pack_matrix"]

# Largest power of two whose double float16 still holds.
_TOP_EXPONENT = 14
# Rounding a weight by less than this part of the largest one vanishes in float32 sums.
_MAX_ROUNDING = 2.0**-26
# Above this many weights the call's overhead drowns in the product, and a second layout buys nothing.
_PLAIN_LIMIT = 2**20


class Matrix(Protocol):
    """The map y = gain * (x W^T) + b with W [out, in] and a bias b [out] or none.

    `gain` is left to the caller, who has it for free: in a norm's weight before, or in a sum after.
    `bias` is therefore b / gain, added to x W^T.
    """

    gain: float
    bias: Tensor | None
    num_outputs: int

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + b / gain [rows, out] for x [rows, in], without the gain."""
        ...

    def product_into(self, x: Tensor, out: Tensor) -> None:
        """Like `product`, into `out` [rows, out]."""
        ...


class HalfMatrix:
    """Float16 weights, exact; float32 arithmetic."""

    __slots__ = ("_into", "_packed", "bias", "gain", "num_outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None, exponent: int) -> None:
        self.gain = 2.0**-exponent
        self.num_outputs = weight.shape[0]
        self.bias = None if bias is None else (bias * 2.0**exponent).contiguous()
        self._packed = torch.fbgemm_pack_gemm_matrix_fp16(weight * 2.0**exponent)
        # Looked up here and not at import: see `_has_half_products`.
        self._into = torch.ops.aten.fbgemm_linear_fp16_weight_fp32_activation.out

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + b / gain."""
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self._packed, self.bias)

    def product_into(self, x: Tensor, out: Tensor) -> None:
        """Write x W^T + b / gain to `out`."""
        self._into(x, self._packed, self.bias, output=out)


class FullMatrix:
    """Float32 weights."""

    __slots__ = ("_invariant", "_packed", "_plain", "bias", "gain", "num_outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, invariant: bool) -> None:
        self.gain = 1.0
        self.num_outputs = weight.shape[0]
        self.bias = None if bias is None else bias.contiguous()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._plain = None
        if not invariant and weight.numel() <= _PLAIN_LIMIT:
            self._plain = weight.t().contiguous()
        self._invariant = invariant

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        if x.shape[0] == 1 and self._plain is not None:
            return x @ self._plain if self.bias is None else torch.addmm(self.bias, x, self._plain)
        if x.shape[0] == 1 and self._invariant:
            # One row alone may take another kernel.
            return self.product(x.repeat(2, 1))[:1]
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    def product_into(self, x: Tensor, out: Tensor) -> None:
        """Write x W^T + b to `out`."""
        if self._plain is None or x.shape[0] > 1:
            out.copy_(self.product(x))
        elif self.bias is None:
            torch.mm(x, self._plain, out=out)
        else:
            torch.addmm(self.bias, x, self._plain, out=out)


def pack_matrix(weight: Tensor, bias: Tensor | None, *, invariant: bool = False) -> Matrix:
    """Lay out a weight [out, in] and bias [out] in the best way that is exact for it.

    Args:
        weight: Of any floating type.
        bias: Or None.
        invariant: A row's product must not depend, to the last bit, on how many rows there are. Float16
            products are like that anyway; the float32 ones then give up their fast kernel for one row.
    """
    weight = weight.float()
    exponent = _exponent(weight)
    if exponent is not None:
        return HalfMatrix(weight, bias, exponent)
    return FullMatrix(weight, bias, invariant=invariant)


def _exponent(weight: Tensor) -> int | None:
    """The power of two that brings the weights into float16's range, None when they do not fit there."""
    largest = weight.abs().max().item()
    if not _has_half_products() or not 0 < largest < math.inf:
        return None
    exponent = _TOP_EXPONENT - math.floor(math.log2(largest))
    scaled = weight * 2.0**exponent
    rounding = (scaled.half().float() - scaled).abs().max().item()
    return exponent if rounding <= _MAX_ROUNDING * largest * 2.0**exponent else None


def _has_half_products() -> bool:
    """Whether this torch and this CPU have FBGEMM's float16 products; asks once, without the warnings."""
    with warnings.catch_warnings():
        # They are announced to be removed from torch one day: FullMatrix takes over then.
        warnings.simplefilter("ignore")
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(2, 2))
            torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 2), packed, None)
        except (AttributeError, RuntimeError):
            return False
    return True
