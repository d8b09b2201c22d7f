"""The judgement on a measured pair: whether it can be served, is lossless and is faster.

A *cycle* here is one proposal and its verification by the two models, plus a given network time; speedups are
over plain decoding with the same target.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gammaray.qualify.measured import PairFacts, Trial

MIN_TESTED = 100
"""With fewer tested tokens the judgement warns that alpha is uncertain."""


class Fitness(str, Enum):
    """The judgement, best first."""

    FIT = "FIT"
    SLOWER = "FIT BUT SLOWER"
    UNFIT = "UNFIT"


@dataclass(frozen=True)
class Judgement:
    """The judgement on a pair: its reasons and warnings in sentences.

    Attributes:
        fitness: The verdict.
        reasons: Why.
        warnings: What else to know.
        best_speedup: The largest measured speedup of all temperatures; 0 when there is none.
    """

    fitness: Fitness
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    best_speedup: float = 0.0


def judge(pair: PairFacts, min_speedup: float) -> Judgement:
    """Return the judgement on a measured pair, which pays from a speedup of `min_speedup` on."""
    refusals = tuple(
        f"the {role} cannot be served: {facts.refusal}"
        for role, facts in (("target", pair.target), ("draft", pair.draft))
        if facts.refusal
    )
    if refusals:
        return Judgement(Fitness.UNFIT, refusals)
    warnings = _warnings(pair)
    timed = [trial for trial in pair.trials if trial.depths]
    best = max((trial.best.speedup for trial in timed), default=0.0)
    losses = tuple(
        f"not lossless at temperature {trial.temperature:g}: {trial.divergence}"
        for trial in pair.trials
        if not trial.is_lossless
    )
    if losses:
        return Judgement(Fitness.UNFIT, losses, tuple(warnings), best)
    if not timed:
        reason = "no proposal had full length, so the speed is unknown: use more tokens"
        return Judgement(Fitness.SLOWER, (reason,), tuple(warnings))
    paying = tuple(_sentence(trial, min_speedup) for trial in timed if trial.best.speedup >= min_speedup)
    other = tuple(_sentence(trial, min_speedup) for trial in timed if trial.best.speedup < min_speedup)
    warnings += [
        f"temperature {trial.temperature:g}: alpha is from {sum(trial.tested)} tested tokens only; ask for "
        "more prompts or tokens"
        for trial in timed
        if sum(trial.tested) < MIN_TESTED
    ]
    if not paying:
        return Judgement(Fitness.SLOWER, other, tuple(warnings), best)
    return Judgement(Fitness.FIT, paying, (*warnings, *other), best)


def _warnings(pair: PairFacts) -> list[str]:
    target, draft = pair.target, pair.draft
    found = ["it drafts in the target worker: --rtt-ms does not apply"] if pair.is_local else []
    if pair.shared is not None:
        found.append(
            f"the vocabularies differ: the draft has {pair.shared:.0%} of the prompts' tokens, so alpha is "
            f"{pair.shared:.2f} at most on such text"
        )
    if draft.max_context < target.max_context:
        found.append(
            f"the draft's context is {draft.max_context} tokens, the target's {target.max_context}: "
            "beyond it nothing is drafted"
        )
    return found + [
        f"temperature {trial.temperature:g}: {trial.ties} of {trial.compared} completions diverge "
        "from plain decoding at a tie, due to rounding"
        for trial in pair.trials
        if trial.ties
    ]


def _sentence(trial: Trial, min_speedup: float) -> str:
    best = trial.best
    does = "pays" if best.speedup >= min_speedup else "does not pay"
    return (
        f"temperature {trial.temperature:g}: speculation {does}: {best.speedup:.2f}x of plain decoding at "
        f"its best, gamma {best.gamma}, with alpha {trial.alpha:.2f}; asked for is {min_speedup:g}x"
    )
