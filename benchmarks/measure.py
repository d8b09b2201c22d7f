"""Interleaved measurement: every system answers one prompt before any answers the next.

A machine's clock drifts and other programs come and go, so figures are compared within a repetition only: a
ratio is taken per repetition (sum of tokens / sum of seconds over its prompts), and its median is reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.systems import Ask, Sample, System

__all__ = ["PLAIN", "REFERENCE", "Samples", "differences", "measure", "row"]

REFERENCE = "generate"
"""transformers' plain decoding."""
PLAIN = "gammaray-0"
"""gammaray's own plain decoding, through the whole stack."""

Samples = dict[str, list[list[Sample]]]
"""By system, repetition and prompt."""


@dataclass(frozen=True)
class Median:
    """The median of one value per repetition, and the values."""

    median: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """Return the median of `values`, at least one."""
        return cls(statistics.median(values), tuple(values))


async def measure(
    systems: Sequence[System], asks: Sequence[Ask], repetitions: int, advance: Callable[[], None]
) -> Samples:
    """Return samples of all systems, interleaved prompt by prompt.

    Each system first answers one short prompt unmeasured. The order rotates, so that no system always runs
    behind the same other one; `advance` is called after each completion.
    """
    for system in systems:
        await system.sample(replace(asks[0], max_tokens=min(16, asks[0].max_tokens)))
    samples: Samples = {system.name: [[] for _ in range(repetitions)] for system in systems}
    for repetition in range(repetitions):
        for i, ask in enumerate(asks):
            turn = (repetition * len(asks) + i) % len(systems)
            for system in (*systems[turn:], *systems[:turn]):
                samples[system.name][repetition].append(await system.sample(ask))
                advance()
    return samples


def speeds(repetitions: Sequence[Sequence[Sample]]) -> list[float]:
    """Return tokens per second, one per repetition."""
    return [
        sum(len(sample.token_ids) for sample in samples) / sum(sample.seconds for sample in samples)
        for samples in repetitions
    ]


def row(system: str, samples: Samples) -> dict[str, Any]:
    """Return the figures of one system, JSON-ready; ratios against systems that were not run are None."""
    own = speeds(samples[system])
    figures: dict[str, Any] = {"system": system, "tokens_per_s": vars(Median.of(own))}
    for name, base in (("over_generate", REFERENCE), ("over_plain", PLAIN)):
        figures[name] = None
        if base in samples:
            pairs = zip(own, speeds(samples[base]), strict=True)
            figures[name] = vars(Median.of([ours / theirs for ours, theirs in pairs]))
    figures["speculation"] = _speculation([s for repetition in samples[system] for s in repetition])
    return figures


def differences(samples: Samples, references: Mapping[str, str]) -> dict[str, Any]:
    """Compare the tokens of systems with those of their reference system, prompt by prompt.

    Returns:
        Completions compared, how many are equal, and for the first ten others system, repetition, prompt and
        the index of the first different token.
    """
    compared, different = 0, []
    for system, reference in references.items():
        for repetition, (ours, theirs) in enumerate(zip(samples[system], samples[reference], strict=True)):
            for prompt, (our, their) in enumerate(zip(ours, theirs, strict=True)):
                compared += 1
                if our.token_ids != their.token_ids:
                    at = first_difference(our.token_ids, their.token_ids)
                    different.append(
                        {"system": system, "repetition": repetition, "prompt": prompt, "token": at}
                    )
    return {"compared": compared, "equal": compared - len(different), "different": different[:10]}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, be it the shorter's end; None when equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def _speculation(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Return what the summaries of one system say together: means per cycle, weighted by cycles."""
    summaries = [sample.summary for sample in samples if sample.summary is not None]
    cycles = sum(summary.cycles for summary in summaries)
    if not cycles:
        return None

    def per_cycle(name: str) -> float:
        return sum(getattr(summary, name) for summary in summaries) / cycles

    tested = [summary for summary in summaries if summary.alpha is not None]
    weight = sum(summary.cycles for summary in tested)
    depth = max(len(summary.accepted_lengths) for summary in summaries)
    histogram = [sum((s.accepted_lengths + (0,) * depth)[j] for s in summaries) for j in range(depth)]
    first = [sample.first_token_s for sample in samples if sample.first_token_s is not None]
    return {
        "cycles": cycles,
        "tokens_per_cycle": sum(s.tokens_per_cycle * s.cycles for s in summaries) / cycles,
        "gamma_mean": sum(s.gamma_mean * s.cycles for s in summaries) / cycles,
        "alpha": sum((s.alpha or 0.0) * s.cycles for s in tested) / weight if tested else None,
        "accepted_lengths": histogram,
        "cycle_ms": {part: per_cycle(f"{part}_ms") for part in ("draft", "verify", "other", "total")},
        "first_token_ms": statistics.median(first) * 1e3 if first else None,
    }
