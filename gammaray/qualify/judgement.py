"""The judgement on a measured candidate: whether it can be served, is lossless and is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gammaray.bench.measure import PLAIN

MIN_CYCLES = 100
"""With fewer cycles the judgement warns that alpha is uncertain."""


class Fitness(str, Enum):
    """The judgement, best first."""

    FIT = "FIT"
    SLOWER = "FIT BUT SLOWER"
    UNFIT = "UNFIT"


@dataclass(frozen=True)
class Judgement:
    """The judgement on a candidate: its reasons and warnings in sentences."""

    fitness: Fitness
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    best_speedup: float = 0.0  # measured, over all temperatures; 0 when there is none


def judge(result: Mapping[str, Any], min_speedup: float, *, is_exact: bool) -> Judgement:
    """Return the judgement on a result of `run_bench`, which pays from a speedup of `min_speedup` on.

    If rows have the same bits in every batch, `is_exact`, any other token is a loss; else it may be rounding.
    """
    paying, other, losses, warnings = list[str](), list[str](), list[str](), list[str]()
    speedups = [0.0]
    for point in result["points"]:
        where, equality = f"temperature {point['temperature']:g}", point["equality"]
        rows = [row for row in point["rows"] if row["system"] != PLAIN]
        best = max(rows, key=lambda row: row["over_plain"]["median"])
        speedup, speculation = best["over_plain"]["median"], best["speculation"]
        speedups.append(speedup)
        if (num_other := equality["compared"] - equality["equal"]) > 0:
            text = f"{where}: {num_other} of {equality['compared']} completions differ from plain decoding"
            (losses if is_exact else warnings).append(text)
        if speculation["cycles"] < MIN_CYCLES:
            text = f"alpha is from {speculation['cycles']} cycles only; ask for more prompts or tokens"
            warnings.append(f"{where}: {text}")
        pays = speedup >= min_speedup
        alpha = "unknown" if speculation["alpha"] is None else f"{speculation['alpha']:.2f}"
        (paying if pays else other).append(
            f"{where}: speculation {'pays' if pays else 'does not pay'}: {speedup:.2f}x of plain decoding at "
            f"its best, {best['system']}, with alpha {alpha}; asked for is {min_speedup:g}x"
        )
    if losses:
        return Judgement(Fitness.UNFIT, tuple(losses), tuple(warnings), max(speedups))
    if not paying:
        return Judgement(Fitness.SLOWER, tuple(other), tuple(warnings), max(speedups))
    return Judgement(Fitness.FIT, tuple(paying), (*warnings, *other), max(speedups))
