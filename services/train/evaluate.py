"""Acceptance of a drafter on held-out answers."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch

from services.train.batches import build_batch
from services.train.drafter import Drafter
from services.train.store import Sequence

__all__ = ["evaluate"]

_LOOKUP = (4, 3, 2)
"""Lengths of the n-grams that prompt lookup seeks, in this order."""


@torch.no_grad()
def evaluate(drafter: Drafter, held: Items[Sequence], gamma: int) -> dict[str, Any]:
    """Return what the drafter reaches.

    Args:
        drafter: The drafter.
        held: Answers that it was not trained on; greedy measures use those of temperature 0.
        gamma: Tokens per proposal.

    Returns:
        `greedy`: share of matches by depth, given that all before matched; `overlap`: 1 - TV at temperature 1
        by depth, over the target's top ids (a lower bound), given the true text; tokens per cycle at
        temperature 0: `tokens_per_cycle` alone, `lookup` of prompt lookup, `lookup_first` of prompt lookup
        where it finds a match, else the drafter, `merged` of a tree with a branch of each; `positions`
        measured. Depths are of the block; a plain draft has the overlap of depth 1 only.
    """
    drafter.eval()
    tested, matched = [0] * gamma, [0] * gamma
    overlap, seen = [0.0] * drafter.depth, [0] * drafter.depth
    cycles = {"tokens_per_cycle": 0, "lookup": 0, "lookup_first": 0, "merged": 0}
    tokens = 0
    for sequence in held:
        batch = build_batch([sequence], drafter.depth, keep=1.0)
        batch = type(batch)(*(part.to(drafter.head.device) for part in vars(batch).values()))
        logs = drafter(batch)
        wanted, found = drafter.common(batch, logs)
        shared = torch.minimum(wanted, found.exp()).sum(-1)
        best = drafter.target_ids[logs.argmax(-1)]
        place = {}
        hits = (best == batch.labels).tolist()
        for (_, anchor, depth), share, hit in zip(batch.place.tolist(), shared.tolist(), hits, strict=True):
            overlap[depth - 1] += share
            seen[depth - 1] += 1
            place[anchor, depth] = hit
        if sequence.temperature:
            continue
        text = sequence.token_ids.tolist()

        def drafted(anchor: int, depth: int, place: dict[tuple[int, int], bool] = place) -> bool:
            # Where all before matched, a plain draft has read the true text.
            key = (anchor, depth) if drafter.depth > 1 else (anchor + depth - 1, 1)
            return place.get(key, False)

        for anchor in range(sequence.num_prompt - 1, len(text) - 1):
            for depth in range(1, min(gamma, len(text) - 1 - anchor) + 1):
                tested[depth - 1] += 1
                if not drafted(anchor, depth):
                    break
                matched[depth - 1] += 1
        tokens += len(text) - sequence.num_prompt
        for way in cycles:
            anchor = sequence.num_prompt - 1
            while anchor < len(text) - 1:
                most = min(gamma, len(text) - 1 - anchor)
                match = _lookup(text, anchor) if way != "tokens_per_cycle" else None
                accepted = _agreeing(text, match, anchor, most) if match is not None else 0
                if way in ("tokens_per_cycle", "merged") or (way == "lookup_first" and match is None):
                    depths = range(1, most + 1)
                    accepted = max(accepted, next((d - 1 for d in depths if not drafted(anchor, d)), most))
                cycles[way] += 1
                anchor += accepted + 1
    drafter.train()
    return {
        "greedy": [round(m / t, 3) if t else 0.0 for m, t in zip(matched, tested, strict=True)],
        "overlap": [round(total / max(1, count), 3) for total, count in zip(overlap, seen, strict=True)],
        **{way: round(tokens / max(1, count), 3) for way, count in cycles.items()},
        "gamma": gamma,
        "positions": tokens,
    }


def _lookup(text: list[int], anchor: int) -> int | None:
    """Return where the text goes on after the latest earlier occurrence of its last tokens."""
    for length in _LOOKUP:
        begin = anchor + 1 - length
        if begin < 1:
            continue
        last = text[begin : anchor + 1]
        for start in range(begin - 1, -1, -1):
            if text[start : start + length] == last:
                return start + length
    return None


def _agreeing(text: list[int], match: int, anchor: int, most: int) -> int:
    """Return how many tokens from a match on, up to the anchor, equal those after the anchor."""
    count = 0
    while count < most and match + count <= anchor and text[match + count] == text[anchor + 1 + count]:
        count += 1
    return count
