"""Acceptance of a drafter on held-out answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

import torch

from services.train.answers.store import Sequence
from services.train.losses import coupled, overlap
from services.train.trainable import DEPTH, Trainable, mixed_precision

_SHARES = {"overlap": overlap, "coupled": coupled}
"""Measures of agreement at temperature 1."""


@torch.no_grad()
def evaluate(drafter: Trainable, answers: Items[Sequence]) -> dict[str, Any]:
    """Return what the drafter reaches on answers that it was not trained on.

    `greedy`: share of matches by depth, given that all before matched, for answers of temperature 0; at
    temperature 1 by depth, given the true text: `overlap`, 1 - TV, and `coupled`, the share that coupled
    verification accepts (lower bounds, over the target's top ids); `tokens_per_cycle` at temperature 0;
    `positions` measured. A draft model has an `overlap` and a `coupled` of depth 1 only.
    """
    drafter.eval()
    tested, matched = [0] * DEPTH, [0] * DEPTH
    shares, seen = {name: [0.0] * drafter.depth for name in _SHARES}, [0] * drafter.depth
    cycles = tokens = 0
    for sequence in answers:
        hits = {}
        for anchor, depth, measures, hit in _predictions(drafter, sequence):
            for total, share in zip(shares.values(), measures, strict=True):
                total[depth - 1] += share
            seen[depth - 1] += 1
            hits[anchor, depth] = hit
        if sequence.temperature:
            continue
        text, start = sequence.token_ids, sequence.num_prompt - 1
        drafted = [
            _drafted(hits, anchor, min(DEPTH, len(text) - 1 - anchor), is_head=drafter.depth > 1)
            for anchor in range(len(text) - 1)
        ]
        for anchor in range(start, len(text) - 1):
            for depth in range(min(DEPTH, len(text) - 1 - anchor, drafted[anchor] + 1)):
                tested[depth] += 1
                matched[depth] += depth < drafted[anchor]
        tokens += len(text) - sequence.num_prompt
        anchor = start
        while anchor < len(text) - 1:
            anchor, cycles = anchor + drafted[anchor] + 1, cycles + 1
    drafter.train()
    return {
        "greedy": [round(m / t, 3) if t else 0.0 for m, t in zip(matched, tested, strict=True)],
        **{
            name: [round(total / max(1, count), 3) for total, count in zip(totals, seen, strict=True)]
            for name, totals in shares.items()
        },
        "tokens_per_cycle": round(tokens / max(1, cycles), 3),
        "gamma": DEPTH,
        "positions": tokens,
    }


def _predictions(drafter: Trainable, sequence: Sequence) -> Iterator[tuple[int, int, list[float], bool]]:
    """Yield anchor, depth, `_SHARES`, and whether the likeliest token is that of the text."""
    device = drafter.head.device
    batch = drafter.batch([sequence], drafter.depth).to(device)
    with mixed_precision(device):
        logs = drafter(batch)
    wanted, drafted = drafter.common(batch, logs)
    shares = torch.stack([share(wanted, drafted) for share in _SHARES.values()], -1)
    hits = drafter.target_ids[logs.argmax(-1)] == batch.labels
    places = zip(batch.place.tolist(), shares.tolist(), hits.tolist(), strict=True)
    for (_, anchor, depth), measures, hit in places:
        yield anchor, depth, measures, hit


def _drafted(hits: Mapping[tuple[int, int], bool], anchor: int, most: int, *, is_head: bool) -> int:
    """Return how many of `most` drafted tokens after an anchor are those of the text."""
    for depth in range(1, most + 1):
        # Where all before matched, a draft model has read the true text.
        if not hits.get((anchor, depth) if is_head else (anchor + depth - 1, 1), False):
            return depth - 1
    return most
