"""Metrics of one system under one load, JSON-ready: the rows of a result file.

Latency metrics: time to the first token and gaps between later tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from gammaray.bench.measure import PLAIN, Samples, median_of, speeds
from gammaray.bench.systems import Arrival
from gammaray.types import SpeculationSummary

Row = dict[str, Any]

BASES = {"over_plain": PLAIN}
"""Name of each ratio -> its denominator system."""


def gaps(arrivals: Sequence[Arrival]) -> list[float]:
    """Return the seconds between the tokens of one completion, without the wait for the first chunk."""
    found: list[float] = []
    for (before, _), (at, num_tokens) in pairwise(arrivals):
        found += [at - before, *[0.0] * (num_tokens - 1)]
    return found


def gap_figures(completions: Iterable[Sequence[Arrival]]) -> dict[str, Any] | None:
    """Return statistics over the gaps of several completions, in milliseconds; None when there are none."""
    found = [gap for arrivals in completions for gap in gaps(arrivals)]
    if not found:
        return None
    percentiles = {f"p{q}_ms": percentile(found, q) * 1e3 for q in (50, 95, 99)}
    return {"mean_ms": statistics.fmean(found) * 1e3, **percentiles}


def percentile(values: Sequence[float], q: float) -> float:
    """Return the `q`th percentile of at least one value, linear between the two nearest."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def row(system: str, samples: Samples, bases: Mapping[str, str] = BASES) -> Row:
    """Return the metrics of one system; ratios to systems that were not run are None.

    - `tokens_per_s` and each ratio of `bases`: median over repetitions, and the values.
    - `speculation`: see `speculation`; None for systems that do not speculate or do not report it.
    - `first_token_ms`: 50th and 99th percentile; `between_tokens`: see `gap_figures`. None for
      systems that do not stream.
    """
    own = speeds(samples[system])
    figures: Row = {"system": system, "tokens_per_s": median_of(own)}
    for name, base in bases.items():
        figures[name] = None
        if base in samples:
            pairs = zip(own, speeds(samples[base]), strict=True)
            figures[name] = median_of([ours / theirs for ours, theirs in pairs])
    flat = [sample for turns in samples[system] for turn in turns for sample in turn.samples]
    figures["speculation"] = speculation([s.summary for s in flat if s.summary is not None])
    waits = [sample.first_token_s * 1e3 for sample in flat if sample.first_token_s is not None]
    figures["first_token_ms"] = {f"p{q}": percentile(waits, q) for q in (50, 99)} if waits else None
    figures["between_tokens"] = gap_figures(sample.arrivals for sample in flat)
    return figures


def speculation(summaries: Sequence[SpeculationSummary]) -> dict[str, Any] | None:
    """Return speculation statistics over several completions; None when there was no cycle.

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
            # At alpha 0 each cycle with a proposal tested exactly one token.
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
        "accepted_lengths": histogram,
        "cycle_ms": {part: sum(getattr(s, f"{part}_ms") for s in summaries) / cycles for part in parts},
    }
