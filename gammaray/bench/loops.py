"""Completions that repeat themselves, which are the easiest texts to draft.

Small models, decoded greedily, often repeat a sentence without end. Speeds of such texts say little about
texts that are read, so tables leave them out and say how many there were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gammaray.bench.measure import PLAIN, Samples

N_GRAM = 6
MAX_REPEATED = 0.5
"""A completion is a loop if more than this share of its 6-grams repeats an earlier one."""


def repeated_share(token_ids: Sequence[int]) -> float:
    """Return the share of a text's 6-grams that occur earlier in it; 0 for fewer than seven tokens."""
    grams = [tuple(token_ids[i : i + N_GRAM]) for i in range(len(token_ids) - N_GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def without_loops(samples: Samples) -> tuple[Samples, dict[str, Any]]:
    """Return the samples without the turns whose completion is a loop, and what was left out, JSON-ready:
    `repeated_share` (one mean per turn and completion), `num_loops` and `kept` (indices of the turns).

    Whether a prompt's completion is a loop is decided by plain decoding, or by the first system where that is
    not measured, over all repetitions, so that every system has the same prompts. Turns with several
    completions in flight are kept, and so is everything if all completions are loops.
    """
    reference = samples[PLAIN] if PLAIN in samples else next(iter(samples.values()))
    shares = [
        [
            sum(repeated_share(turns[turn].samples[i].token_ids) for turns in reference) / len(reference)
            for i in range(len(reference[0][turn].samples))
        ]
        for turn in range(len(reference[0]))
    ]
    kept = [turn for turn, found in enumerate(shares) if len(found) > 1 or found[0] <= MAX_REPEATED]
    kept = kept or list(range(len(shares)))
    found = {
        "repeated_share": [[round(share, 3) for share in turn] for turn in shares],
        "num_loops": sum(share > MAX_REPEATED for turn in shares for share in turn),
        "kept": kept,
    }
    parts = {
        system: [[turns[turn] for turn in kept] for turns in repetitions]
        for system, repetitions in samples.items()
    }
    return parts, found


def loops_line(loops: dict[str, Any]) -> str:
    """Return one line for people about the loops of a point; empty if it has none."""
    if not loops["num_loops"]:
        return ""
    total = sum(map(len, loops["repeated_share"]))
    left_out = len(loops["repeated_share"]) - len(loops["kept"])
    where = "left out of the figures" if left_out else "in the figures"
    return f"{loops['num_loops']} of {total} completions repeat themselves (loops): {where}"
