"""The best gamma: as measured, and as the theory predicts it from measured alpha and costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.bench.measure import PLAIN
from gammaray.bench.rows import Row
from gammaray.bench.systems import stack_name
from gammaray.maths.theory import optimal_gamma

__all__ = ["Costs", "chain_gammas", "optimum", "pooled_alpha"]

CURVE_GAMMAS = 16
"""Largest gamma of the prediction."""


@dataclass(frozen=True)
class Costs:
    """Cost model of a cycle, in units of a plain cycle: 1 + `latency` * 2 + gamma * `draft_cost`.

    Attributes:
        plain_cycle_ms: Time of a cycle at gamma 0, in milliseconds.
        draft_cost: Cost per proposed token: its draft step, and its share of the longer verification.
        latency: Half of the fixed cost of a cycle with a proposal: the one-way time to the draft worker.
    """

    plain_cycle_ms: float
    draft_cost: float
    latency: float

    @classmethod
    def fit(cls, plain_cycle_ms: float, cycles_ms: Sequence[tuple[int, float]]) -> Costs:
        """Fit a line through (gamma, cycle time), gamma above 0; the line of one point starts at gamma 0."""
        gammas = [float(gamma) for gamma, _ in cycles_ms]
        times = [ms for _, ms in cycles_ms]
        if len(set(gammas)) > 1:
            slope, start = statistics.linear_regression(gammas, times)
        else:
            start = plain_cycle_ms
            slope = (statistics.fmean(times) - start) / gammas[0]
        return cls(
            plain_cycle_ms,
            draft_cost=max(0.0, slope / plain_cycle_ms),
            latency=max(0.0, (start / plain_cycle_ms - 1.0) / 2.0),
        )


def optimum(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return the measured best gamma and the predicted one, with the costs used for the prediction.

    Only chains of fixed gamma are used; None without one, without gamma 0, or when no token was tested.
    `best_system` may be a tree or adaptive.
    """
    by_name = {row["system"]: row for row in rows}
    chains = [(gamma, by_name[stack_name(gamma)]) for gamma in chain_gammas(rows) if gamma > 0]
    plain = _cycle_ms(by_name[PLAIN]) if PLAIN in by_name else None
    timed = [(gamma, ms) for gamma, row in chains if (ms := _cycle_ms(row)) is not None]
    alpha = pooled_alpha([row for _, row in chains])
    if plain is None or not timed or alpha is None:
        return None
    costs = Costs.fit(plain, timed)
    fastest = max([(0, by_name[PLAIN]), *chains], key=lambda chain: _speed(chain[1]))
    return {
        "alpha": alpha,
        **vars(costs),
        "gamma_measured": fastest[0],
        "gamma_predicted": optimal_gamma(alpha, costs.draft_cost, costs.latency, CURVE_GAMMAS),
        "best_system": max(
            (row for name, row in by_name.items() if name.startswith(stack_name(""))), key=_speed
        )["system"],
    }


def chain_gammas(rows: Sequence[Row]) -> list[int]:
    """Return the gammas of all chains of fixed depth, in order."""
    prefix = stack_name("")
    names = (row["system"].removeprefix(prefix) for row in rows if row["system"].startswith(prefix))
    return sorted(int(name) for name in names if name.isdecimal())


def _cycle_ms(row: Row) -> float | None:
    """Return the mean time of a cycle as seen by the client, in milliseconds, without the first cycle."""
    gaps = row["between_tokens"]
    return float(gaps["mean_ms"] * gaps["tokens_per_cycle"]) if gaps else None


def pooled_alpha(rows: Sequence[Row]) -> float | None:
    """Return accepted / tested over several systems; None when nothing was tested."""
    accepted = tested = 0.0
    for row in rows:
        figures = row["speculation"]
        if figures and figures["alpha"]:
            passed = sum(length * count for length, count in enumerate(figures["accepted_lengths"]))
            accepted += passed
            tested += passed / figures["alpha"]
    return accepted / tested if tested else None


def _speed(row: Row) -> float:
    return float(row["tokens_per_s"]["median"])
