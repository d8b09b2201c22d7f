"""Decoding loops over the engines, as a draft and a target worker on one device would run them.

Proposals and verdicts pass through the host, as they do between workers: each cycle has one copy back from
the draft and one from the target.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.pair import random_tokens
from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.graph_engine import GraphEngine

__all__ = ["Session", "Trace", "decode", "new_sessions", "propose", "release", "speculate"]

NUM_GUESSES = 6
"""As in `services.speculation.predictions`, which needs more packages."""


@dataclass
class Session:
    """A text under way; `text` holds prompt and tokens so far."""

    name: str
    text: list[int]
    gumbel_draw: GumbelDraw
    num_prompt: int

    @property
    def tokens(self) -> list[int]:
        """What was generated."""
        return self.text[self.num_prompt :]


@dataclass
class Trace:
    """What a loop did.

    Attributes:
        seconds: Wall time.
        draft_seconds: Of that, waiting for the draft.
        target_seconds: Of that, waiting for the target.
        cycles: Target steps.
        emitted: Tokens of all sessions.
        tested: Proposed tokens that were tested.
        accepted: Of these, accepted.
    """

    seconds: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    cycles: int = 0
    emitted: int = 0
    tested: int = 0
    accepted: int = 0
    starts: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Of all sessions together."""
        return self.emitted / self.seconds


def new_sessions(
    engines: Sequence[GraphEngine], count: int, num_prompt: int, temperature: float
) -> list[Session]:
    """Return sessions whose prompts all engines have read, but for the last token."""
    sessions = [
        Session(
            f"session-{index}",
            random_tokens(num_prompt, index, engines[0].vocab_size),
            GumbelDraw(seed=1000 + index, temperature=temperature),
            num_prompt,
        )
        for index in range(count)
    ]
    for engine in engines:
        engine.step([SequenceInput(s.name, 0, s.text[:-1], 0) for s in sessions])
    return sessions


def release(engines: Sequence[GraphEngine], sessions: Sequence[Session]) -> None:
    """Free the sessions' caches."""
    for engine in engines:
        for session in sessions:
            engine.release(session.name)


def decode(target: GraphEngine, sessions: Sequence[Session], num_steps: int) -> Trace:
    """Plain decoding: one token per session and step."""
    gumbel_draws = [session.gumbel_draw for session in sessions]
    trace, began = Trace(), time.perf_counter()
    for _ in range(num_steps):
        feeds = [SequenceInput(s.name, len(s.text) - 1, s.text[-1:], 1) for s in sessions]
        for session, tokens in zip(sessions, target.choose(feeds, gumbel_draws), strict=True):
            session.text.extend(tokens)
    trace.seconds = trace.target_seconds = time.perf_counter() - began
    trace.cycles, trace.emitted = num_steps, num_steps * len(sessions)
    return trace


def speculate(
    target: GraphEngine,
    draft: GraphEngine,
    sessions: Sequence[Session],
    num_cycles: int,
    gamma: int,
) -> Trace:
    """Cycles of one proposal and one verification per session, with coupled or greedy verification.

    Args:
        target: Its cache holds all of each text but the last token.
        draft: Likewise.
        sessions: The batch; it stays the same for all cycles.
        num_cycles: Cycles.
        gamma: Length of each proposal.
    """
    gumbel_draws = [session.gumbel_draw for session in sessions]
    trace, began = Trace(), time.perf_counter()
    for _ in range(num_cycles):
        started = time.perf_counter()
        proposals = propose(draft, sessions, gumbel_draws, gamma)
        proposed = time.perf_counter()
        feeds = [
            SequenceInput(s.name, len(s.text) - 1, [s.text[-1], *tokens], len(tokens) + 1)
            for s, tokens in zip(sessions, proposals, strict=True)
        ]
        choices = target.choose(feeds, gumbel_draws)
        trace.draft_seconds += proposed - started
        trace.target_seconds += time.perf_counter() - proposed
        for session, proposal, chosen in zip(sessions, proposals, choices, strict=True):
            _commit(session, proposal, chosen, trace)
    trace.seconds, trace.cycles = time.perf_counter() - began, num_cycles
    return trace


def propose(
    draft: GraphEngine, sessions: Sequence[Session], gumbel_draws: Sequence[GumbelDraw], gamma: int
) -> list[list[int]]:
    """Return `gamma` tokens per session, as a draft worker drafts them."""
    # Two tokens always, although one is often cached: then the batch is always of the same size.
    feeds = [SequenceInput(s.name, len(s.text) - 2, s.text[-2:], 1) for s in sessions]
    drafts = draft.draft(feeds, gumbel_draws, gamma, num_guesses=NUM_GUESSES)
    return [[one.token_id for one in own] for own in drafts]


def _commit(session: Session, proposal: Sequence[int], chosen: Sequence[int], trace: Trace) -> None:
    """Extend the text by the accepted tokens and one more."""
    accepted = 0
    while accepted < len(proposal) and proposal[accepted] == chosen[accepted]:
        accepted += 1
    trace.emitted += accepted + 1
    trace.accepted += accepted
    trace.tested += min(accepted + 1, len(proposal))
    session.text.extend(chosen[: accepted + 1])
