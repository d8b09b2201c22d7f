"""The operations of a step as Triton kernels, which can be captured.

Products of few rows stream the weights once through the tensor cores, with the addition to the residual
stream or the gated activation at their end; many rows go to the library. Attention reads each session's own
keys and values up to its own length: splits of SPLIT slots are reduced apart from each other and then in
their order. A row's sums therefore do not depend on the rows that come with it, nor on other sessions, as
long as it is fed with at most MAX_ROWS rows and its tokens lie in the same slots: a chain's logits are those
of decoding it token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from services.engine.core.device import shared_memory
from services.engine.core.kv_cache import BLOCK
from services.engine.cuda import triton_attention as attention
from services.engine.cuda import triton_products as jit
from services.engine.cuda.tables import MAX_CAPTURED_ROWS, TILE_ROWS, Bucket, Run, Tables
from services.engine.cuda.torch_kernels import Stripes, TorchKernels
from services.engine.cuda.weights import GraphModel

__all__ = ["MAX_LONG_SPLITS", "MAX_ROWS", "TritonKernels"]

MAX_ROWS = 32
"""Products of more rows are the library's: reading them would cost more than reading the weights."""

MAX_LONG_SPLITS = 32
"""Splits of the longest context in steps of more than MAX_ROWS rows, so that their scratch stays small."""

_MAX_STAGES = 4
_SPLIT = 256
# Programs of attention for one tile's key heads, and for all tiles, of which most may be spare.
_TILE_PROGRAMS, _MAX_PROGRAMS = 256, 2048


class TritonKernels(TorchKernels):
    """Like TorchKernels, on the device alone.

    Args:
        model: Its sizes are those of all models served, and its dtype is the caches'.
        max_rows: Products of more rows go to the library; 0 to have them all there.
        shared_bytes: Shared memory that a block may have; None: that of the model's device.
    """

    def __init__(
        self, model: GraphModel, *, max_rows: int = MAX_ROWS, shared_bytes: int | None = None
    ) -> None:
        super().__init__(model)
        self.max_rows = max_rows
        self._shared_bytes = shared_memory(model.device) if shared_bytes is None else shared_bytes
        self.capturable = model.device.type == "cuda"

    def new_scratch(self, bucket: Bucket, device: torch.device) -> list[Tensor]:
        """Unnormalised outputs, largest scores and sums of each split."""
        rows = min(bucket.rows, MAX_CAPTURED_ROWS)
        shape = (rows, self.shape.num_heads, triton.cdiv(bucket.max_slots, _split(bucket)))
        outputs = torch.empty(*shape, self.shape.head_dim, dtype=torch.float32, device=device)
        return [outputs, torch.empty(shape, device=device), torch.empty(shape, device=device)]

    def norm(self, x: Tensor, weight: Tensor, out: Tensor, rows: Tensor | None = None) -> None:
        """See TorchKernels."""
        size = x.shape[1]
        jit.norm_kernel[(out.shape[0],)](
            x,
            weight,
            out,
            x if rows is None else rows,
            self.shape.norm_eps,
            size,
            HAS_ROWS=rows is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=8,
        )

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """See TorchKernels."""
        if x.shape[0] > self.max_rows:
            super().linear(x, weight, bias, out)
        else:
            self._product(x, weight, bias, out, out.shape[1])

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """See TorchKernels."""
        if x.shape[0] > self.max_rows:
            super().add_linear(x, weight, bias, residual)
        else:
            self._product(x, weight, bias, residual, residual.shape[1], adds=True)

    def swiglu(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """See TorchKernels."""
        if x.shape[0] > self.max_rows:
            super().swiglu(x, gate_up, out)
        else:
            self._product(x, gate_up, None, out, out.shape[1], gates=True)

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        num_outputs: int,
        *,
        adds: bool = False,
        gates: bool = False,
    ) -> None:
        rows, size = x.shape
        tile, depth = _product_tile(rows, size, x.element_size())
        row_tile = max(16, triton.next_power_of_2(rows))
        step_bytes = depth * (row_tile + (2 * tile if gates else tile)) * x.element_size()
        jit.product_kernel[(triton.cdiv(num_outputs, tile),)](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            num_outputs,
            SIZE=size,
            HAS_BIAS=bias is not None,
            ADDS=adds,
            GATES=gates,
            ROWS=row_tile,
            TILE=tile,
            DEPTH=depth,
            num_warps=4,
            # Loads ahead, as many as there is memory for; they do not change the order of the sums.
            num_stages=min(_MAX_STAGES, 1 + self._shared_bytes // step_bytes),
        )

    def rotate(self, qkv: Tensor, layer: int, head_norm: Tensor | None, tables: Tables) -> None:
        """See TorchKernels."""
        shape = self.shape
        attention.rotate_kernel[(qkv.shape[0], shape.num_qkv_heads)](
            qkv,
            self.rotation,
            qkv if head_norm is None else head_norm,
            self.anchor,
            tables.page,
            tables.first_page,
            tables.position,
            tables.slot,
            tables.session,
            layer,
            self.rotation.shape[1],
            shape.norm_eps,
            HAS_NORM=head_norm is not None,
            HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads,
            HALF=shape.head_dim // 2,
            PAGE=BLOCK,
            num_warps=1,
        )

    def attend(
        self, qkv: Tensor, layer: int, tables: Tables, scratch: Sequence[Tensor], mixed: Tensor
    ) -> None:
        """See TorchKernels."""
        for run in tables.runs:
            self._attend_run(qkv, layer, tables, run, scratch, mixed)
        for index in tables.alone:
            self.attend_alone(qkv, layer, tables, index, mixed)

    def _attend_run(
        self,
        qkv: Tensor,
        layer: int,
        tables: Tables,
        run: Run,
        scratch: Sequence[Tensor],
        mixed: Tensor,
    ) -> None:
        shape, split = self.shape, _split(tables.bucket)
        outputs, largest, sums = scratch
        max_splits = outputs.shape[2]
        # Enough programs for the device if only one tile is not spare; each takes every so-many-th split.
        num_programs = min(_TILE_PROGRAMS, _MAX_PROGRAMS // run.tiles) // shape.num_kv_heads
        attention.split_kernel[(run.tiles * shape.num_kv_heads, max(1, min(max_splits, num_programs)))](
            qkv,
            self.anchor,
            outputs,
            largest,
            sums,
            tables.page,
            tables.first_page,
            tables.slot,
            tables.prefix,
            tables.bits,
            tables.tile_session,
            tables.tile,
            tables.first_row,
            tables.count,
            tables.tree_base,
            layer,
            run.first_row,
            run.first_tile,
            tables.bucket.words,
            max_splits,
            shape.scaling,
            HEADS=shape.num_heads,
            KV_HEADS=shape.num_kv_heads,
            DIM=shape.head_dim,
            SPLIT=split,
            PAGE=BLOCK,
            ROWS=TILE_ROWS,
            num_warps=4,
            num_stages=2,
        )
        attention.combine_kernel[(run.rows, shape.num_heads)](
            outputs,
            largest,
            sums,
            tables.slot,
            mixed,
            run.first_row,
            max_splits,
            HEADS=shape.num_heads,
            DIM=shape.head_dim,
            SPLIT=split,
            num_warps=1,
        )

    def stripes(self, logits: Tensor, tables: Tables, out: Stripes) -> None:
        """See TorchKernels."""
        wanted, vocab_size = logits.shape
        num_stripes = out.score.shape[1]
        jit.stripe_kernel[(wanted, num_stripes)](
            logits,
            tables.wanted,
            tables.session,
            tables.position,
            tables.seed,
            tables.sample_index,
            tables.is_drawn,
            tables.inverse_temperature,
            tables.sharpness,
            out.score,
            out.token,
            out.mass,
            vocab_size,
            STRIPE=out.size,
            num_warps=1,
        )

    def pick(self, stripes: Stripes, tokens: Tensor) -> None:
        """See TorchKernels."""
        rows, num_stripes = stripes.score.shape
        jit.pick_kernel[(rows,)](
            stripes.score, stripes.token, tokens, num_stripes, BLOCK=triton.next_power_of_2(num_stripes)
        )


def _split(bucket: Bucket) -> int:
    """Slots per split: one number for all steps of few rows, whose bits it decides; more for many rows, since
    each row needs memory for each of its splits."""
    if bucket.rows <= MAX_ROWS:
        return _SPLIT
    return _SPLIT * -(-bucket.max_slots // (MAX_LONG_SPLITS * _SPLIT))


def _product_tile(rows: int, size: int, itemsize: int) -> tuple[int, int]:
    """Outputs per program and depth of a tile; neither changes the order in which a sum is taken."""
    depth = 512 // itemsize
    while size % depth:
        depth //= 2
    return 16 if rows <= 16 else 32, depth
