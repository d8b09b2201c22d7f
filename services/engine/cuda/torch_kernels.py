"""The operations of a step in plain torch: the reference, and what runs where there is no Triton.

Attention, the noise and the cache writes look at the tables from the host, so this cannot be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from services.engine.core.batch import Segment
from services.engine.core.kv_cache import BLOCK
from services.engine.cuda.tables import MASK_BITS, Bucket, Tables
from services.engine.cuda.weights import GraphModel
from services.engine.sampling.noise import exponential

__all__ = ["Stripes", "TorchKernels"]

_MAX_STRIPE = 256
_NUM_STRIPES = 64


@dataclass(frozen=True)
class Stripes:
    """The best token of each stripe of consecutive ids, per wanted row.

    Attributes:
        size: Ids per stripe, a power of two.
        score: Perturbed logit of the best, float64 [wanted, stripes].
        token: Its id, int64 [wanted, stripes].
        mass: Sum of exp(sharpness * (score of a token - score of the best)) over the stripe, float32
            [wanted, stripes].
    """

    size: int
    score: Tensor
    token: Tensor
    mass: Tensor

    @classmethod
    def make(cls, wanted: int, vocab_size: int, device: torch.device) -> Stripes:
        """Buffers for `wanted` rows."""
        size = _MAX_STRIPE
        while size > 4 and vocab_size < size * _NUM_STRIPES:
            size //= 2
        shape = (wanted, -(-vocab_size // size))
        score = torch.zeros(shape, dtype=torch.float64, device=device)
        token = torch.zeros(shape, dtype=torch.int64, device=device)
        return cls(size, score, token, torch.ones(shape, device=device))

    def empty(self, shape: tuple[int, ...]) -> Stripes:
        """Buffers of another shape [..., stripes], for copies."""
        return Stripes(self.size, *(one.new_empty(shape) for one in (self.score, self.token, self.mass)))

    def write(self, index: int, other: Stripes) -> None:
        """Copy the first rows of others to `index` of these buffers' first dimension."""
        for own, source in zip(
            (self.score, self.token, self.mass), (other.score, other.token, other.mass), strict=True
        ):
            own[index].copy_(source[: own.shape[1]])

    def of_rows(self, wanted: int) -> Stripes:
        """The first rows of these buffers."""
        return Stripes(self.size, self.score[:wanted], self.token[:wanted], self.mass[:wanted])


class TorchKernels:
    """The operations of `services.engine.cuda.runner`.

    Args:
        model: Its sizes are those of all models served, and its dtype is the caches'.

    Attributes:
        anchor: Pages are counted from here; see `Tables.page`.
        capturable: Whether a step of these operations can become a CUDA graph.
        max_rows: Products of more rows go to the library; all of them here.
    """

    def __init__(self, model: GraphModel) -> None:
        self.shape = model.shape
        self.rotation = model.rotation
        self.anchor = torch.zeros(64, dtype=model.dtype, device=model.device)
        self.capturable = False
        self.max_rows = 0

    def new_scratch(self, bucket: Bucket, device: torch.device) -> list[Tensor]:
        """Memory that `attend` needs in addition to its output, the same for all layers."""
        return []

    def norm(self, x: Tensor, weight: Tensor, out: Tensor, rows: Tensor | None = None) -> None:
        """RMSNorm of x [rows, hidden] float32 (or of its rows `rows`) into `out` of the model's type."""
        if rows is not None:
            x = x[rows.clamp(min=0)]  # a spare one takes some row
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.shape.norm_eps)
        out.copy_(x * scale * weight)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """x W^T + b into `out`."""
        out.copy_(F.linear(x, weight, bias))

    def add_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> None:
        """Add x W^T + b to `residual` [rows, hidden] float32."""
        residual.add_(F.linear(x, weight, bias))

    def swiglu(self, x: Tensor, gate_up: Tensor, out: Tensor) -> None:
        """silu(x G^T) * (x U^T) into `out` [rows, intermediate], G above U in `gate_up`."""
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        torch.mul(F.silu(gate), up, out=out)

    def rotate(self, qkv: Tensor, layer: int, head_norm: Tensor | None, tables: Tables) -> None:
        """Norm and rotate the heads of qkv [rows, num_qkv_heads * head_dim]; write keys and values."""
        shape = self.shape
        rows, kv_heads = qkv.shape[0], shape.num_kv_heads
        heads = qkv.view(rows, shape.num_qkv_heads, shape.head_dim)
        turned = heads[:, : -shape.num_kv_heads]
        x = turned.float()
        if head_norm is not None:
            weight = head_norm.float().repeat_interleave(
                torch.tensor((shape.num_heads, kv_heads), device=qkv.device), dim=0
            )
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape.norm_eps) * weight
        cos, sin = self.rotation[:, tables.position].unsqueeze(2)
        low, high = x.chunk(2, -1)
        turned.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), -1))
        for index, segment in enumerate(tables.segments):
            own = _rows_of(segment)
            slots = tables.slot[own]
            pages = self._pages(tables, index)[slots // BLOCK]
            segment.cache.data[pages, layer, :, slots % BLOCK] = heads[own, shape.num_heads :]

    def attend(
        self, qkv: Tensor, layer: int, tables: Tables, scratch: Sequence[Tensor], mixed: Tensor
    ) -> None:
        """Attention of the rotated queries over the cache into `mixed` [rows, num_heads * head_dim]."""
        for index in range(len(tables.segments)):
            self.attend_alone(qkv, layer, tables, index, mixed)

    def attend_alone(self, qkv: Tensor, layer: int, tables: Tables, index: int, mixed: Tensor) -> None:
        """Attention of one session by the library: its flash kernel, where that masks a chain."""
        shape, segment = self.shape, tables.segments[index]
        own = _rows_of(segment)
        num_slots = segment.slot + segment.count
        queries = qkv.view(qkv.shape[0], shape.num_qkv_heads, shape.head_dim)[own, : shape.num_heads]
        pages = self._pages(tables, index)
        slots = segment.cache.data[pages, layer].transpose(0, 1).flatten(1, 2)[:, :num_slots]
        keys, values = slots.chunk(2)
        if segment.parents is None and segment.count > 1:
            mask: Tensor = causal_lower_right(segment.count, num_slots)
        else:
            mask = _allowed(tables, index, own, num_slots)
        output = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            scale=shape.scaling,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        mixed[own] = output[0].transpose(0, 1).flatten(1)

    def _pages(self, tables: Tables, index: int) -> Tensor:
        """Numbers of the pages that a session's rows see, as the table has them."""
        segment, first = tables.segments[index], tables.first_pages[index]
        data = segment.cache.data
        origin = (data.data_ptr() - self.anchor.data_ptr()) // data.element_size()
        count = -(-(segment.slot + segment.count) // BLOCK)
        return (tables.page[first : first + count] - origin) // data[0].numel()

    def stripes(self, logits: Tensor, tables: Tables, out: Stripes) -> None:
        """Perturb logits [wanted, vocab_size] float32 by the sessions' Gumbel noise, find each stripe's best.

        Args:
            logits: Of the wanted rows.
            tables: Say which session and position a row belongs to.
            out: Where to.
        """
        wanted, vocab_size = logits.shape
        padded = logits.new_full((wanted, out.score.shape[1] * out.size), float("-inf"), dtype=torch.float64)
        scores = padded[:, :vocab_size]
        rows = tables.wanted.clamp(min=0)
        sessions = tables.session[rows]
        scores.copy_(logits * tables.inverse_temperature[sessions, None])
        for row, session in enumerate(sessions.tolist()):
            if tables.wanted[row] >= 0 and tables.is_drawn[session]:
                seed = int(tables.seed[session]) % 2**64
                position = int(tables.position[rows[row]]) + 1
                sample_index = int(tables.sample_index[session])
                noise = exponential(
                    seed, position, 1, vocab_size, sample_index=sample_index, device=logits.device
                )
                scores[row] -= noise[0].log_()
        striped = padded.view(wanted, -1, out.size)
        best = striped.max(-1)
        out.score.copy_(best.values)
        out.token.copy_(best.indices)
        out.token.add_(torch.arange(striped.shape[1], device=logits.device) * out.size)
        weight = (striped - best.values[..., None]) * tables.sharpness[sessions, None, None]
        out.mass.copy_(weight.exp().sum(-1))

    def pick(self, stripes: Stripes, tokens: Tensor) -> None:
        """The best token of each row into `tokens` [wanted], lowest id on ties.

        -1 for rows whose best score is not a finite number.
        """
        best, index = stripes.score.max(-1, keepdim=True)
        tokens.copy_(stripes.token.gather(1, index)[:, 0])
        tokens.masked_fill_(~best[:, 0].isfinite(), -1)


def _rows_of(segment: Segment) -> slice:
    return slice(segment.row, segment.row + segment.count)


def _allowed(tables: Tables, index: int, own: slice, num_slots: int) -> Tensor:
    """Boolean [rows, slots]: what each row of a session sees."""
    slots = torch.arange(num_slots, device=tables.slot.device)
    node = slots - tables.tree_base[index]
    is_node = (node >= 0) & (node < MASK_BITS * tables.bits.shape[1])
    words = tables.bits[own][:, (node // MASK_BITS).clamp(0, tables.bits.shape[1] - 1)]
    seen = (words >> (node % MASK_BITS)) & 1
    return (slots < tables.prefix[own, None]) | (is_node & (seen == 1))
