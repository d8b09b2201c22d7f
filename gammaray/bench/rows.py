"""The figures of one system under one load, JSON-ready: every metric of a result file's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gammaray.bench.latency import gap_figures, percentile
from gammaray.bench.measure import PLAIN, Median, Samples, speeds
from gammaray.bench.systems import Sample
from gammaray.types import SpeculationSummary

__all__ = ["Row", "row", "speculation"]

Row = dict[str, Any]

BASES = {"over_plain": PLAIN}
"""Ratio -> system it is over."""


def row(system: str, samples: Samples, bases: Mapping[str, str] = BASES) -> Row:
    """Return the figures of one system; ratios against systems that were not run are None.

    - `tokens_per_s` and each ratio of `bases`: median over repetitions, and the values.
    - `speculation`: see `speculation`; None for systems that do not speculate or do not tell.
    - `first_token_ms`: 50th and 99th percentile; `between_tokens`: see `latency.gap_figures`. None for
      systems that do not stream.
    """
    own = speeds(samples[system])
    figures: Row = {"system": system, "tokens_per_s": vars(Median.of(own))}
    for name, base in bases.items():
        figures[name] = None
        if base in samples:
            pairs = zip(own, speeds(samples[base]), strict=True)
            figures[name] = vars(Median.of([ours / theirs for ours, theirs in pairs]))
    flat = [sample for turns in samples[system] for turn in turns for sample in turn.samples]
    figures["speculation"] = speculation([s.summary for s in flat if s.summary is not None])
    figures["first_token_ms"] = _first_token(flat)
    figures["between_tokens"] = gap_figures(sample.arrivals for sample in flat)
    return figures


def speculation(summaries: Sequence[SpeculationSummary]) -> dict[str, Any] | None:
    """Return what several completions say together; None when there was no cycle.

    Rates are ratios of sums: `alpha` = accepted / tested, `acceptance_rate` = accepted / drafted. Times in
    `cycle_ms` are means per cycle, prefill included.
    """
    cycles = sum(summary.cycles for summary in summaries)
    if not cycles:
        return None
    accepted = tested = 0.0
    for summary in summaries:
        passed = sum(length * count for length, count in enumerate(summary.accepted_lengths))
        accepted += passed
        if summary.alpha is not None:
            # Where nothing passed, each cycle with a proposal tested one token.
            tested += passed / summary.alpha if summary.alpha > 0 else summary.cycles
    drafted = sum(summary.gamma_mean * summary.cycles for summary in summaries)
    emitted = sum(summary.tokens_per_cycle * summary.cycles for summary in summaries)
    depth = max(len(summary.accepted_lengths) for summary in summaries)
    histogram = [sum((s.accepted_lengths + (0,) * depth)[j] for s in summaries) for j in range(depth)]
    parts = ("draft", "verify", "other", "total")
    return {
        "cycles": cycles,
        "tokens_per_cycle": emitted / cycles,
        "gamma_mean": drafted / cycles,
        "alpha": accepted / tested if tested else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "wasted_per_token": (drafted - accepted) / emitted,
        "accepted_lengths": histogram,
        "cycle_ms": {part: sum(getattr(s, f"{part}_ms") for s in summaries) / cycles for part in parts},
    }


def _first_token(samples: Sequence[Sample]) -> dict[str, float] | None:
    waits = [sample.first_token_s * 1e3 for sample in samples if sample.first_token_s is not None]
    return {f"p{q}": percentile(waits, q) for q in (50, 99)} if waits else None
