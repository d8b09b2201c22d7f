"""The operations of a step in plain torch: the reference, and what runs where there is no Triton.

Attention, the noise and the cache writes look at the tables from the host, so this cannot be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.core.kv_cache import BLOCK
from services.engine.cuda.tables import Bucket, Tables
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
        mass: Sum of exp(sharpness * (score of a token - score of the best)) over the stripe, float64
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
        return cls(size, score, token, torch.zeros_like(score))

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
            x = x[rows]
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
        for index, cache in enumerate(tables.caches):
            own = _rows_of(tables, index)
            slots = tables.slot[own]
            pages = self._pages(tables, index)[slots // BLOCK]
            cache.data[pages, layer, :, slots % BLOCK] = heads[own, shape.num_heads :]

    def attend(
        self,
        qkv: Tensor,
        layer: int,
        tables: Tables,
        bucket: Bucket,
        scratch: list[Tensor],
        mixed: Tensor,
    ) -> None:
        """Attention of the rotated queries over the cache into `mixed` [rows, num_heads * head_dim]."""
        shape = self.shape
        queries = qkv.view(qkv.shape[0], shape.num_qkv_heads, shape.head_dim)[:, : shape.num_heads]
        for index, cache in enumerate(tables.caches):
            own = _rows_of(tables, index)
            allowed = _allowed(tables, index, own)
            num_slots = allowed.shape[1]
            pages = self._pages(tables, index)[: -(-num_slots // BLOCK)]
            slots = cache.data[pages, layer].transpose(0, 1).flatten(1, 2)[:, :num_slots]
            keys, values = slots.chunk(2)
            group = shape.num_heads // shape.num_kv_heads
            output = F.scaled_dot_product_attention(
                queries[own].transpose(0, 1),
                keys.repeat_interleave(group, 0),
                values.repeat_interleave(group, 0),
                attn_mask=allowed,
                scale=shape.scaling,
            )
            mixed[own] = output.transpose(0, 1).flatten(1)

    def _pages(self, tables: Tables, index: int) -> Tensor:
        """Numbers of a session's pages, as the table has them."""
        data = tables.caches[index].data
        origin = (data.data_ptr() - self.anchor.data_ptr()) // data.element_size()
        return (tables.page[index] - origin) // data[0].numel()

    def stripes(self, logits: Tensor, tables: Tables, sharpness: Tensor | None, out: Stripes) -> None:
        """Perturb logits [wanted, vocab_size] float32 by the sessions' Gumbel noise, find each stripe's best.

        Args:
            logits: Of the wanted rows.
            tables: Say which session and position a row belongs to.
            sharpness: [1] float64 for `mass`; None when that is not wanted.
            out: Where to.
        """
        wanted, vocab_size = logits.shape
        padded = logits.new_full((wanted, out.score.shape[1] * out.size), float("-inf"), dtype=torch.float64)
        scores = padded[:, :vocab_size]
        sessions = tables.session[tables.wanted]
        scores.copy_(logits * tables.inverse_temperature[sessions, None])
        for row, session in enumerate(sessions.tolist()):
            if tables.is_drawn[session]:
                seed = int(tables.seed[session]) % 2**64
                position = int(tables.position[tables.wanted[row]]) + 1
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
        if sharpness is not None:
            out.mass.copy_(((striped - best.values[..., None]) * sharpness).exp().sum(-1))

    def pick(self, stripes: Stripes, tokens: Tensor, *, marks_bad: bool = False) -> None:
        """The best token of each row into `tokens` [wanted], lowest id on ties.

        Args:
            stripes: Of the rows.
            tokens: Where to.
            marks_bad: Write -1 for rows whose best score is not a finite number; else such a row gets some
                token of the vocabulary.
        """
        best, index = stripes.score.max(-1, keepdim=True)
        tokens.copy_(stripes.token.gather(1, index)[:, 0])
        if marks_bad:
            tokens.masked_fill_(~best[:, 0].isfinite(), -1)


def _rows_of(tables: Tables, index: int) -> slice:
    first = int(tables.first_row[index])
    return slice(first, first + int(tables.count[index]))


def _allowed(tables: Tables, index: int, own: slice) -> Tensor:
    """Boolean [rows, slots]: what each row of a session sees."""
    last, base = tables.slot[own].max(), int(tables.tree_base[index])
    slots = torch.arange(int(last) + 1, device=last.device)
    node = (slots - base).clamp(min=0)
    words = tables.bits[own][:, (node // 64).clamp(max=tables.bits.shape[1] - 1)]
    seen = (words >> (node % 64)) & 1
    return (slots < tables.prefix[own, None]) | ((slots >= base) & (seen == 1))
