"""Rows cut into attention calls whose shapes depend on positions alone.

Sums over slots are rounded in an order that depends on how many slots there are, and matrix products choose
their kernel by the number of rows. So rows of one block of 64 positions go together and see the slots up to
the block's end behind a mask, and fewer than four rows are filled up. Whether a token comes alone, in a
chunk or in a batch, its row then has the same shape and the same sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from services.engine.batch import Segment, node_path
from services.engine.kv_cache import BLOCK

__all__ = ["MIN_STACKED_ROWS", "Part", "bias_of", "chain_mask", "segment_parts", "stack_mask"]

MIN_STACKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a segment that attend in one call.

    Attributes:
        first: First row, counted from the segment's.
        last: Row after the last.
        position: Position of the first row; the others follow it.
        end: How many slots the rows see, the masked ones included: up to the end of the block.
        path: For a node of a tree: `end` slots, in the order of their positions. None: slots 0, 1, ...
    """

    first: int
    last: int
    position: int
    end: int
    path: Tensor | None = None


def segment_parts(segment: Segment) -> list[Part]:
    """Cut a segment: a chain by blocks, a tree's nodes one by one, each as the end of its own path."""
    num_nodes = len(segment.parents or ())
    start, chain_end = segment.start, segment.start + segment.count - num_nodes
    parts = []
    position = start
    while position < chain_end:
        end = position // BLOCK * BLOCK + BLOCK
        last = min(end, chain_end)
        parts.append(Part(position - start, last - start, position, end))
        position = last
    for row in range(chain_end - start, segment.count):
        parts.append(_node_part(segment, row))
    return parts


def chain_mask(part: Part, window: int | None) -> Tensor | None:
    """0 or -inf [rows, end] for the rows of a part; None when all is seen."""
    count = part.last - part.first
    if count == 1 and part.position + 1 == part.end and (window is None or window >= part.end):
        return None
    positions = torch.arange(part.position, part.position + count)[:, None]
    slots = torch.arange(part.end)
    allowed = slots <= positions
    if window is not None:
        allowed &= slots > positions - window
    return bias_of(allowed)


def stack_mask(mask: Tensor | None, group: int) -> Tensor | None:
    """A mask [rows, end] for `group` heads stacked as rows: [1, stacked rows or 1, end]."""
    if mask is None or mask.shape[0] == 1:
        return None if mask is None else mask[None]
    mask = mask.repeat(group, 1)
    missing = MIN_STACKED_ROWS - mask.shape[0]
    return (mask if missing <= 0 else F.pad(mask, (0, 0, 0, missing)))[None]


def bias_of(allowed: Tensor) -> Tensor:
    """What to add to scores: 0 where `allowed`, else -inf."""
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def _node_part(segment: Segment, row: int) -> Part:
    assert segment.parents is not None
    position = segment.positions[row]
    end = position // BLOCK * BLOCK + BLOCK
    first_node = segment.count - len(segment.parents)
    num_chain, nodes = node_path(segment, segment.num_kept + row - first_node)
    path = [*range(num_chain), *nodes]
    # What lies behind the node is masked; any slot will do there.
    path += [0] * (end - len(path))
    return Part(row, row + 1, position, end, torch.tensor(path))
