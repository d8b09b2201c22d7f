"""Training batches: answers with blocks of masks, conditionally dropped (COD, PARD, arXiv 2504.18583).

Row (anchor a, depth 1) is the real token a; row (a, k) is the mask at position a + k - 1, which predicts
token a + k. A row sees the real tokens up to its anchor and the masks of its own block before it, as
when serving.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from torch import Tensor

from services.train.answers.store import Sequence

__all__ = ["KEEP", "MASK", "Batch", "build_batch"]

MASK = -1
KEEP, _KEEP_LEAST = 0.7, 0.2


@dataclass(frozen=True)
class Batch:
    """Inputs and what the target expects.

    Attributes:
        token_ids: int64 [sequences, rows]; `MASK` is the mask token.
        positions: int64 [sequences, rows].
        allowed: Whether a row sees another one, bool [sequences, 1, rows, rows].
        rows: Sequence and row of each prediction, int64 [predictions, 2].
        place: Sequence, anchor and depth (from 1) of each prediction, int64 [predictions, 3].
        labels: Token of the answer at the predicted place, int64 [predictions].
        top_ids: The target's most likely ids there, int64 [predictions, top_k].
        top_logs: Their log-probabilities at temperature 1, float32 [predictions, top_k].
    """

    token_ids: Tensor
    positions: Tensor
    allowed: Tensor
    rows: Tensor
    place: Tensor
    labels: Tensor
    top_ids: Tensor
    top_logs: Tensor


def build_batch(
    sequences: Items[Sequence], depth: int, *, keep: float = KEEP, generator: torch.Generator | None = None
) -> Batch:
    """Return one batch.

    Args:
        sequences: Answers with their prompts.
        depth: Rows per block; 1: no masks.
        keep: Share of the blocks that goes on from each depth to the next, at least 0.2 in all; 1 keeps all.
        generator: Chooses them.
    """
    parts = [_blocks(sequence, depth, keep, generator) for sequence in sequences]
    width = max(len(anchors) for _, anchors, _ in parts)
    shape = (len(parts), width)
    token_ids, positions = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    allowed = torch.eye(width, dtype=torch.bool).repeat(len(parts), 1, 1, 1)  # padding sees itself: no NaN
    rows, place, labels, ids, logs = [], [], [], [], []
    for number, (sequence, (tokens, anchors, depths)) in enumerate(zip(sequences, parts, strict=True)):
        count = len(tokens)
        token_ids[number, :count], positions[number, :count] = tokens, anchors + depths - 1
        is_real = depths == 1
        sees = is_real & (anchors <= anchors[:, None])
        sees |= ~is_real & (anchors == anchors[:, None]) & (depths <= depths[:, None])
        allowed[number, 0, :count, :count] = sees
        label = anchors + depths
        chosen = ((label >= sequence.num_prompt) & (label < len(sequence.token_ids))).nonzero()[:, 0]
        label = label[chosen]
        rows.append(torch.stack((torch.full_like(chosen, number), chosen), 1))
        place.append(torch.stack((rows[-1][:, 0], anchors[chosen], depths[chosen]), 1))
        labels.append(torch.from_numpy(sequence.token_ids[label.numpy()].astype("int64")))
        answer = label.numpy() - sequence.num_prompt
        ids.append(torch.from_numpy(sequence.top_ids[answer].astype("int64")))
        logs.append(torch.from_numpy(sequence.top_logs[answer].astype("float32")))
    joined = (torch.cat(part) for part in (rows, place, labels, ids, logs))
    return Batch(token_ids, positions, allowed, *joined)


def _blocks(
    sequence: Sequence, depth: int, keep: float, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, anchor and depth of each row."""
    count = len(sequence.token_ids)
    real = torch.from_numpy(sequence.token_ids.astype("int64"))
    tokens, anchors, depths = [real], [torch.arange(count)], [torch.ones(count, dtype=torch.long)]
    # One number per anchor, so that a block that has depth k has all depths before it.
    chance = torch.rand(count, generator=generator)
    for k in range(2, depth + 1):
        begins = torch.arange(sequence.num_prompt - 1, max(sequence.num_prompt - 1, count - k))
        begins = begins[chance[begins] < max(_KEEP_LEAST, keep ** (k - 1))]
        tokens.append(torch.full_like(begins, MASK))
        anchors.append(begins)
        depths.append(torch.full_like(begins, k))
    return torch.cat(tokens), torch.cat(anchors), torch.cat(depths)
