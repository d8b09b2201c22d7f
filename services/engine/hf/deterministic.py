"""Deterministic mode: a token's logits are bit-identical whatever else is in a step.

With `load_engine(..., deterministic=True)` the same tokens give bit-identical logits alone and in a batch,
one by one, in chunks of any size, as a proposal of any gamma and as nodes of a tree. So the drawn tokens do
not depend on gamma, the drafter or the load, even if two logits differ by no more than rounding.

The compiled kernel (`services.engine.native`) is deterministic in any mode: every sum of a row runs over the
same numbers in the same order. On the general path matrix products, sums and elementwise functions choose
kernels, and so roundings, by shape. The mode fixes the shapes: attention calls have those of
`services.engine.hf.attention`, `FixedRows` computes products with oneDNN's kernels, which treat a row alike
whatever the number of rows, and steps are padded to whole vectors of rows. The libraries guarantee none of
this. Therefore every load in this mode feeds 80 positions in these ways, and refuses the model if a bit
differs.

Limits: float32 on a CPU with one arithmetic thread; anything else is refused. Results may differ between
machines and versions of torch. Measured on an AMD EPYC 9004 (AVX-512) with torch 2.13, hundreds of positions:
Llama, Mistral, Qwen2 and Qwen3 (kernel and general path), Mixtral, Gemma2, Gemma3, Phi3, GPT-2, GPT-NeoX,
OPT, DeepSeek-V3 and GPT-OSS (general path; experts one by one, which is slow, and only with intermediate
sizes that are multiples of 32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import LoadedModel

# Steps on the general path are padded to a multiple of this many rows.
ROW_MULTIPLE = 32
_MIN_PRODUCT_ROWS = 16


def check_covered(loaded: LoadedModel) -> None:
    """Refuse models that deterministic mode does not cover; switch experts to a loop of plain products.

    Raises:
        UnsupportedModelError: Not float32, not on a CPU, quantised, or more than one thread.
    """
    if loaded.device.type != "cpu" or loaded.dtype != torch.float32:
        raise UnsupportedModelError(
            loaded.name, f"deterministic mode covers float32 on CPU, not {loaded.dtype} on {loaded.device}"
        )
    if loaded.stored is not None and not loaded.has_plain_weights:
        raise UnsupportedModelError(
            loaded.name, f"deterministic mode does not cover {loaded.stored.method} weights"
        )
    if torch.get_num_threads() != 1:
        raise UnsupportedModelError(
            loaded.name, f"deterministic mode needs 1 thread, not {torch.get_num_threads()}"
        )
    if any(loaded.module.get_experts_implementation().values()):
        loaded.module.set_experts_implementation("eager")


class FixedRows(TorchFunctionMode):
    """Computes products of rows with a matrix by oneDNN, in whose kernels a row does not depend on others.

    That does not hold for very few rows, which are therefore padded.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace products of rows with a matrix; call all other functions unchanged."""
        if func is F.linear:
            return _product(*args, **(kwargs or {}))
        if func in _MATMULS and not kwargs and args[1].ndim == 2 and args[0].ndim >= 2:
            return _product(args[0], args[1].t())
        if func is torch.addmm and not kwargs:
            return _product(args[1], args[2].t(), args[0])
        return func(*args, **(kwargs or {}))


_MATMULS = frozenset({torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm})


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    missing = max(0, _MIN_PRODUCT_ROWS - flat.shape[0])
    if missing:
        flat = F.pad(flat, (0, 0, 0, missing))
    output: Tensor = torch.ops.mkldnn._linear_pointwise(flat, weight, bias, "none", [], "")
    return output[: output.shape[0] - missing].reshape(*rows.shape[:-1], weight.shape[0])
