"""The target's law of two tokens, from transformers, and the chi-square test of tokens of many seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Pair = tuple[int, int]


def pair_law(
    directory: Path | str, prompt: Sequence[int], allowed: Sequence[int], temperature: float
) -> dict[Pair, float]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    places = list(allowed)

    @torch.no_grad()
    def after(tokens: Sequence[int]) -> dict[int, float]:
        logits = model(torch.tensor([list(tokens)])).logits[0, -1, places] / temperature
        return dict(zip(places, logits.softmax(-1).tolist(), strict=True))

    first = after(prompt)
    second = {token: after([*prompt, token]) for token in places}
    return {(a, b): first[a] * second[a][b] for a in places for b in places}


def chi_square(counts: Counter[Pair], law: Mapping[Pair, float]) -> float:
    """Return the p-value of counts under a law; outcomes of under five expected counts are put together."""
    total = counts.total()
    rare = [outcome for outcome, prob in law.items() if prob * total < 5]
    cells = [(counts[outcome], law[outcome] * total) for outcome in law if outcome not in rare]
    if rare:
        cells.append(
            (sum(counts[outcome] for outcome in rare), sum(law[outcome] for outcome in rare) * total)
        )
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2.0), torch.tensor(statistic / 2)))


def check_law(counts: Counter[Pair], law: Mapping[Pair, float], alpha: float, tilt: float = 0.1) -> None:
    """Check that counts have a law, and not that whose likeliest outcome has another `tilt` of all."""
    assert set(counts) <= set(law)
    assert chi_square(counts, law) > alpha
    likely = max(law, key=lambda outcome: law[outcome])
    tilted = {outcome: prob + tilt * (outcome == likely) for outcome, prob in law.items()}
    mass = math.fsum(tilted.values())
    assert chi_square(counts, {outcome: prob / mass for outcome, prob in tilted.items()}) < alpha
