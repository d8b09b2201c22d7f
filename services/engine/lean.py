"""The lean path: Llama-like models in few torch calls per layer, for the draft step and the verify.

Products go through `services.engine.matrices`; everything else writes into buffers that are made once per
number of rows. Attention is two batched products and a softmax per session and block of positions: rows of
one block see the cache up to the block's end, behind a mask, and the heads of a group are stacked as rows
so that keys and values are not copied. These fixed shapes make a row's result independent of the rows that
come with it, see `services.engine.deterministic`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch import Batch
from services.engine.lean_attention import LeanAttention, SegmentWork
from services.engine.lean_weights import LeanModel, LeanShape

__all__ = ["LeanRunner"]

_norm = torch.linalg.vector_norm
_MAX_KEPT_ROWS = 32


@dataclass(slots=True)
class _Buffers:
    """Everything a layer writes for a number of rows; views share memory with their neighbours."""

    wide: Tensor  # [rows, hidden + 1]: the residual stream, and what keeps its norm from being zero
    x: Tensor  # [rows, hidden], in wide
    h: Tensor  # [rows, hidden]
    length: Tensor  # [rows, 1]
    qkv: Tensor  # [rows, (num_heads + 2 num_kv_heads) head_dim]
    heads: Tensor  # [rows, num_heads + num_kv_heads, head_dim], in qkv
    gate_up: Tensor  # [rows, 2 intermediate]
    gate: Tensor  # [rows, intermediate], in gate_up
    up: Tensor  # [rows, intermediate], in gate_up
    inner: Tensor  # [rows, intermediate]
    mixed: Tensor  # [rows, num_heads head_dim]
    attention: LeanAttention

    @classmethod
    def make(cls, shape: LeanShape, rows: int) -> _Buffers:
        # RMSNorm's epsilon as one more number of the vector: |(x, floor)|^2 = |x|^2 + hidden * epsilon.
        wide = torch.full((rows, shape.hidden + 1), (shape.hidden * shape.norm_eps) ** 0.5)
        num_rotated = shape.num_heads + shape.num_kv_heads
        qkv = torch.empty(rows, (num_rotated + shape.num_kv_heads) * shape.head_dim)
        gate_up = torch.empty(rows, 2 * shape.intermediate)
        mixed = torch.empty(rows, shape.num_heads * shape.head_dim)
        return cls(
            wide=wide,
            x=wide[:, : shape.hidden],
            h=torch.empty(rows, shape.hidden),
            length=torch.empty(rows, 1),
            qkv=qkv,
            heads=qkv[:, : num_rotated * shape.head_dim].view(rows, num_rotated, shape.head_dim),
            gate_up=gate_up,
            gate=gate_up[:, : shape.intermediate],
            up=gate_up[:, shape.intermediate :],
            inner=torch.empty(rows, shape.intermediate),
            mixed=mixed,
            attention=LeanAttention(shape, qkv, mixed),
        )


class LeanRunner:
    """Runs steps on the weights of `services.engine.lean_weights`.

    Args:
        model: The weights.
        exact_trees: A tree's nodes get the very bits of a chain, one call per node and layer.
    """

    def __init__(self, model: LeanModel, *, exact_trees: bool = False) -> None:
        shape = model.shape
        self._model = model
        self._exact_trees = exact_trees
        self._head_floor = torch.tensor((shape.head_dim * shape.norm_eps) ** 0.5)
        self._buffers: dict[int, _Buffers] = {}
        self._windows = {layer.window for layer in model.layers}
        self._rotation = torch.empty(3, 0, shape.head_dim // 2)

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, vocab_size] in float32; writes the new keys and values."""
        model, rows = self._model, batch.logit_rows
        if rows is not None and not rows:
            self._layers(batch)
            return torch.empty(0, model.head.num_outputs)
        wide = self._layers(batch)
        if rows is not None:
            wide = wide[rows]
        x = wide[:, :-1].div(_norm(wide, 2, -1, True)).mul_(model.last_norm)
        return model.head.product(x)

    def _layers(self, batch: Batch) -> Tensor:
        """The residual stream [rows, hidden + 1] after the last layer, with its floor."""
        model = self._model
        buffers = self._buffers_for(len(batch.token_ids))
        work = self._plan(buffers, batch)
        wide, x, h, length = buffers.wide, buffers.x, buffers.h, buffers.length
        qkv, mixed = buffers.qkv, buffers.mixed
        gate_up, gate, up, inner = buffers.gate_up, buffers.gate, buffers.up, buffers.inner
        div, mul, activation = torch.div, torch.mul, model.activation
        run = buffers.attention.run
        if len(batch.token_ids) == 1:
            x[0] = model.embedding[batch.token_ids[0]]
        else:
            x.copy_(model.embedding[torch.tensor(batch.token_ids)])
        for index, layer in enumerate(model.layers):
            _norm(wide, 2, -1, True, out=length)
            div(x, length, out=h).mul_(layer.attention_norm)
            layer.qkv.product_into(h, qkv)
            if layer.head_norm is not None:
                self._norm_heads(buffers.heads, layer.head_norm)
            run(work, index, layer.window)
            x.add_(layer.out.product(mixed), alpha=layer.out.gain)
            _norm(wide, 2, -1, True, out=length)
            div(x, length, out=h).mul_(layer.mlp_norm)
            layer.gate_up.product_into(h, gate_up)
            mul(activation(gate), up, out=inner)
            x.add_(layer.down.product(inner), alpha=layer.down.gain)
        return wide

    def _norm_heads(self, heads: Tensor, weight: Tensor) -> None:
        """RMSNorm in place on query and key heads [rows, num_heads + num_kv_heads, head_dim]."""
        heads.div_(torch.hypot(_norm(heads, 2, -1, True), self._head_floor)).mul_(weight)

    def _buffers_for(self, rows: int) -> _Buffers:
        buffers = self._buffers.get(rows)
        if buffers is None:
            buffers = _Buffers.make(self._model.shape, rows)
            if rows <= _MAX_KEPT_ROWS:
                self._buffers[rows] = buffers
        return buffers

    def _plan(self, buffers: _Buffers, batch: Batch) -> list[SegmentWork]:
        last = max(batch.positions)
        if last >= self._rotation.shape[1]:
            factors = self._model.rotation(2 * (last + 1))
            self._rotation = torch.stack(
                (factors * self._model.shape.scaling, factors, torch.ones_like(factors))
            )
        plan = buffers.attention.plan
        return [plan(s, self._rotation, self._windows, self._exact_trees) for s in batch.segments]
