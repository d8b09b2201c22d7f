"""One forward over packed rows, written once for both kinds of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.graphs_tables import Bucket, Tables
from services.engine.graphs_torch import Stripes, TorchKernels
from services.engine.graphs_weights import GraphModel

__all__ = ["Buffers", "run_forward"]


@dataclass
class Buffers:
    """What a forward writes; the residual stream and the logits are float32, the rest of the model's type.

    Attributes:
        x: [rows, hidden], the residual stream.
        h: [rows, hidden].
        qkv: [rows, num_qkv_heads * head_dim].
        mixed: [rows, num_heads * head_dim].
        inner: [rows, intermediate].
        last: [wanted, hidden].
        logits: [wanted, vocab_size].
        stripes: Of the wanted rows.
        tokens: [wanted], drawn.
        scratch: Of the kernels.
    """

    x: Tensor
    h: Tensor
    qkv: Tensor
    mixed: Tensor
    inner: Tensor
    last: Tensor
    logits: Tensor
    stripes: Stripes
    tokens: Tensor
    scratch: list[Tensor]

    @classmethod
    def make(cls, model: GraphModel, kernels: TorchKernels, bucket: Bucket) -> Buffers:
        """Buffers for all steps of a bucket."""
        shape, device, dtype = model.shape, model.device, model.dtype
        rows, wanted = bucket.rows, bucket.wanted

        def zeros(*sizes: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        return cls(
            x=zeros(rows, shape.hidden, kind=torch.float32),
            h=zeros(rows, shape.hidden),
            qkv=zeros(rows, shape.num_qkv_heads * shape.head_dim),
            mixed=zeros(rows, shape.num_heads * shape.head_dim),
            inner=zeros(rows, shape.intermediate),
            last=zeros(wanted, shape.hidden),
            logits=zeros(wanted, shape.vocab_size, kind=torch.float32),
            stripes=Stripes.make(wanted, shape.vocab_size, device),
            tokens=zeros(wanted, kind=torch.int64),
            scratch=kernels.new_scratch(bucket, device),
        )


def run_forward(
    model: GraphModel, kernels: TorchKernels, bucket: Bucket, tables: Tables, buffers: Buffers
) -> None:
    """Feed the rows of `tables`: new keys and values go to the caches, logits to `buffers`."""
    x, h, qkv, mixed, inner = buffers.x, buffers.h, buffers.qkv, buffers.mixed, buffers.inner
    x.copy_(F.embedding(tables.token, model.embedding))
    for index, layer in enumerate(model.layers):
        kernels.norm(x, layer.attention_norm, h)
        kernels.linear(h, layer.qkv, layer.qkv_bias, qkv)
        kernels.rotate(qkv, index, layer.head_norm, tables)
        kernels.attend(qkv, index, tables, bucket, buffers.scratch, mixed)
        kernels.add_linear(mixed, layer.out, layer.out_bias, x)
        kernels.norm(x, layer.mlp_norm, h)
        kernels.swiglu(h, layer.gate_up, inner)
        kernels.add_linear(inner, layer.down, None, x)
    if bucket.wanted:
        kernels.norm(x, model.last_norm, buffers.last, tables.wanted)
        kernels.linear(buffers.last, model.head, None, buffers.logits)
