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
from services.engine.device_drafting import GraphEngine, TreeShape

__all__ = ["Session", "Trace", "decode", "new_sessions", "release", "speculate"]


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
    shape: int | TreeShape,
) -> Trace:
    """Cycles of one proposal and one verification per session, with coupled or greedy verification.

    Args:
        target: Its cache holds all of each text but the last token.
        draft: Likewise.
        sessions: The batch; it stays the same for all cycles.
        num_cycles: Cycles.
        shape: gamma for chains, or the shape of trees.
    """
    gumbel_draws = [session.gumbel_draw for session in sessions]
    trace, began = Trace(), time.perf_counter()
    for _ in range(num_cycles):
        started = time.perf_counter()
        proposals = _propose(draft, sessions, gumbel_draws, shape)
        proposed = time.perf_counter()
        feeds = [
            SequenceInput(s.name, len(s.text) - 1, [s.text[-1], *tokens], len(tokens) + 1, parents)
            for s, (tokens, parents) in zip(sessions, proposals, strict=True)
        ]
        choices = target.choose(feeds, gumbel_draws)
        trace.draft_seconds += proposed - started
        trace.target_seconds += time.perf_counter() - proposed
        for session, proposal, chosen in zip(sessions, proposals, choices, strict=True):
            _commit(target, draft, session, proposal, chosen, trace)
    trace.seconds, trace.cycles = time.perf_counter() - began, num_cycles
    return trace


def _propose(
    draft: GraphEngine,
    sessions: Sequence[Session],
    gumbel_draws: Sequence[GumbelDraw],
    shape: int | TreeShape,
) -> list[tuple[list[int], list[int] | None]]:
    # Two tokens always, although one is often cached: then the batch is always of the same size.
    feeds = [SequenceInput(s.name, len(s.text) - 2, s.text[-2:], 1) for s in sessions]
    if isinstance(shape, TreeShape):
        return list(draft.draft_trees(feeds, gumbel_draws, shape))
    return [(tokens, None) for tokens in draft.draft_chains(feeds, gumbel_draws, shape)]


def _commit(
    target: GraphEngine,
    draft: GraphEngine,
    session: Session,
    proposal: tuple[list[int], list[int] | None],
    chosen: Sequence[int],
    trace: Trace,
) -> None:
    """Walk down the target's own tokens, keep the caches of the path, extend the text."""
    tokens, parents = proposal
    base, path = len(session.text), list[int]()
    row = 0
    while True:
        children = _children(tokens, parents, row - 1)
        node = next((node for node in children if tokens[node] == chosen[row]), None)
        if node is None:
            break
        path.append(node)
        row = node + 1
    trace.emitted += len(path) + 1
    trace.accepted += len(path)
    trace.tested += len(path) + bool(children)
    if parents is not None:
        target.keep_path(session.name, base, path)
        num_cached = draft.num_nodes(session.name)
        draft.keep_path(session.name, base, [node for node in path if node < num_cached])
    session.text.extend([*(tokens[node] for node in path), chosen[row]])


def _children(tokens: Sequence[int], parents: Sequence[int] | None, node: int) -> list[int]:
    if parents is None:
        return [node + 1] if node + 1 < len(tokens) else []
    return [child for child, parent in enumerate(parents) if parent == node]
