"""The judgement on a measured pair: whether it can be served, is lossless and is faster.

A *cycle* here is one proposal and its verification by the two models, plus a given network time; speedups are
over plain decoding with the same target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gammaray.qualify.measured import Decision, ModelFacts, Overlap, PairFacts, Run

MIN_TESTED = 100
"""With fewer tested tokens the judgement warns that alpha is uncertain."""

MIN_TESTED_AT = 10
"""Tested tokens required to report alpha at one position in the proposal."""


class Fitness(str, Enum):
    """The judgement, best first."""

    FIT = "FIT"
    SLOWER = "FIT BUT SLOWER"
    UNFIT = "UNFIT"


@dataclass(frozen=True)
class Depth:
    """Chains of one gamma: mean tokens of whole proposals, median times, and the measured speedup."""

    gamma: int
    tokens_per_cycle: float
    draft_ms: float
    verify_ms: float
    cycle_ms: float
    speedup: float


@dataclass(frozen=True)
class Payoff:
    """Results of speculation at one temperature.

    Args:
        temperature: 0 is greedy.
        alpha: Accepted / tested over all depths.
        tested: Tested tokens from which alpha was computed.
        by_position: Alpha by position in the proposal, as far as `MIN_TESTED_AT` tokens were tested.
        plain_ms: Time of a plain cycle: a target pass over one token.
        draft_step_ms: Time of one forward pass of the draft.
        depths: Results by gamma, without those at which no proposal was whole.
        decision: The result of the sequential test, if there was one.
    """

    temperature: float
    alpha: float
    tested: int
    by_position: tuple[float, ...]
    plain_ms: float
    draft_step_ms: float
    depths: tuple[Depth, ...]
    decision: Decision | None = None

    @property
    def best(self) -> Depth:
        """The measured depth with the largest speedup."""
        return max(self.depths, key=lambda depth: depth.speedup)

    def pays(self, min_speedup: float) -> bool:
        """Whether it reaches the speedup: as decided, else as measured."""
        if self.decision is not None and self.decision.pays is not None:
            return self.decision.pays
        return self.best.speedup >= min_speedup


@dataclass(frozen=True)
class Judgement:
    """The judgement on a pair: its reasons and warnings in sentences, and the results by temperature."""

    fitness: Fitness
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    payoffs: tuple[Payoff, ...] = ()

    @property
    def best_speedup(self) -> float:
        """The largest measured speedup of all temperatures; 0 when there is none."""
        return max((payoff.best.speedup for payoff in self.payoffs), default=0.0)


def judge(pair: PairFacts, rtt_ms: float = 0.0, min_speedup: float = 1.0) -> Judgement:
    """Return the judgement on a pair.

    Args:
        pair: The measurements.
        rtt_ms: Network time of a cycle beyond that of plain decoding, in milliseconds; a candidate that
            drafts in the target worker has none.
        min_speedup: Smallest speedup at which speculation pays.
    """
    if found := obstacles(pair.target, pair.draft):
        return Judgement(Fitness.UNFIT, tuple(found))
    warnings, rtt_ms = _caveats(pair), 0.0 if pair.is_local else rtt_ms
    payoffs = tuple(
        payoff for one in pair.equality if (payoff := _payoff(pair, one.temperature, rtt_ms)) is not None
    )
    losses = tuple(
        f"not lossless at temperature {one.temperature:g}: {one.first}"
        for one in pair.equality
        if not one.is_lossless
    )
    if losses:
        return Judgement(Fitness.UNFIT, losses, tuple(warnings), payoffs)
    if not payoffs:
        reason = "no proposal had full length, so the speed is unknown: use more tokens"
        return Judgement(Fitness.SLOWER, (reason,), tuple(warnings))
    paying = [payoff for payoff in payoffs if payoff.pays(min_speedup)]
    other = [_sentence(payoff, min_speedup) for payoff in payoffs if payoff not in paying]
    warnings += [note for payoff in payoffs if (note := _uncertain(payoff))]
    if not paying:
        return Judgement(Fitness.SLOWER, tuple(other), tuple(warnings), payoffs)
    reasons = tuple(_sentence(payoff, min_speedup) for payoff in paying)
    return Judgement(Fitness.FIT, reasons, tuple(warnings + other), payoffs)


def obstacles(target: ModelFacts, draft: ModelFacts) -> list[str]:
    """Return the reasons why the pair cannot be served, in sentences; empty if it can."""
    found = [
        f"the {role} cannot be served: {facts.refusal}"
        for role, facts in (("target", target), ("draft", draft))
        if facts.refusal
    ]
    if has_other_vocabulary(target, draft) and not draft.tokenizer_sha256:
        found.append(
            f"the vocabularies differ ({target.vocab_size} token ids of the target, {draft.vocab_size} of "
            "the draft) and the draft has no tokenizer to map its tokens with"
        )
    return found


def has_other_vocabulary(target: ModelFacts, draft: ModelFacts) -> bool:
    """Return whether the draft's tokens must be mapped to the target's."""
    if target.vocab_size and draft.vocab_size and target.vocab_size != draft.vocab_size:
        return True
    return bool(target.tokenizer_sha256) and draft.tokenizer_sha256 not in ("", target.tokenizer_sha256)


def _caveats(pair: PairFacts) -> list[str]:
    target, draft = pair.target, pair.draft
    found = ["it drafts in the target worker: --rtt-ms does not apply"] if pair.is_local else []
    if pair.overlap is not None:
        found.append(_mapped(pair.overlap, target, draft))
    if not draft.tokenizer_sha256 and not pair.is_local:
        found.append("the draft has no tokenizer, so its tokens could not be compared with the target's")
    if draft.max_context < target.max_context:
        found.append(
            f"the draft's context is {draft.max_context} tokens, the target's {target.max_context}: "
            "beyond it nothing is drafted"
        )
    return found + [
        f"temperature {equality.temperature:g}: {equality.ties} of {equality.compared} completions diverge "
        "from plain decoding at a tie, due to rounding"
        for equality in pair.equality
        if equality.ties
    ]


def _mapped(overlap: Overlap, target: ModelFacts, draft: ModelFacts) -> str:
    return (
        f"the vocabularies differ ({target.vocab_size} token ids of the target, {draft.vocab_size} of the "
        f"draft): the draft has {overlap.shared} of the target's tokens, {overlap.prompt_share:.0%} of those "
        f"of the prompts, so alpha is {overlap.prompt_share:.2f} at most on such text"
    )


def _payoff(pair: PairFacts, temperature: float, rtt_ms: float) -> Payoff | None:
    """Return the results; None if plain decoding or all depths lack a time, or no token was tested."""
    here = [run for run in pair.runs if run.temperature == temperature]
    plain_ms = next((run.verify_ms for run in here if run.gamma == 0), None)
    timed = [
        (run, run.draft_ms, run.verify_ms)
        for run in here
        if run.gamma > 0 and run.draft_ms is not None and run.verify_ms is not None
    ]
    tested = sum(sum(run.tested) for run in here)
    if plain_ms is None or not timed or tested == 0:
        return None
    depths = []
    for run, draft_ms, verify_ms in timed:
        cycle_ms = draft_ms + verify_ms + rtt_ms
        tokens = run.whole_emitted / run.whole_cycles
        depths.append(Depth(run.gamma, tokens, draft_ms, verify_ms, cycle_ms, tokens * plain_ms / cycle_ms))
    return Payoff(
        temperature=temperature,
        alpha=sum(sum(run.accepted) for run in here) / tested,
        tested=tested,
        by_position=_by_position([run for run, _, _ in timed]),
        plain_ms=plain_ms,
        draft_step_ms=min(run.draft_step_ms or draft_ms for run, draft_ms, _ in timed),
        depths=tuple(depths),
        decision=next((one for one in pair.decisions if one.temperature == temperature), None),
    )


def _by_position(runs: Sequence[Run]) -> tuple[float, ...]:
    places = range(max(run.gamma for run in runs))
    tested = [sum(run.tested[place] for run in runs if place < run.gamma) for place in places]
    accepted = [sum(run.accepted[place] for run in runs if place < run.gamma) for place in places]
    both = zip(accepted, tested, strict=True)
    return tuple(passed / count for passed, count in both if count >= MIN_TESTED_AT)


def _sentence(payoff: Payoff, min_speedup: float) -> str:
    best = payoff.best
    does = "pays" if payoff.pays(min_speedup) else "does not pay"
    decision = payoff.decision
    certain = decision is not None and decision.pays is not None
    error = f"; wrong with a probability of at most {decision.error:g}" if decision and certain else ""
    return (
        f"temperature {payoff.temperature:g}: speculation {does}: {best.speedup:.2f}x of plain decoding at "
        f"its best, gamma {best.gamma}, with alpha {payoff.alpha:.2f}; asked for is {min_speedup:g}x{error}"
    )


def _uncertain(payoff: Payoff) -> str:
    """Return a note on a result that more tokens could change; "" if none could."""
    decision = payoff.decision
    if decision is not None and decision.pays is None:
        what = f"whether speculation pays is not certain (error {decision.error:g}) after all tokens"
    elif decision is None and payoff.tested < MIN_TESTED:
        what = f"alpha is from {payoff.tested} tested tokens only"
    else:
        return ""
    return f"temperature {payoff.temperature:g}: {what}; ask for more prompts or tokens"
