"""One cycle: propose, verify, commit, adapt.

This module knows neither gRPC nor Ray nor Redis: drafter, verifier, store and controller are Protocols.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from gammaray.errors import GammarayError, InternalError, InvalidArgumentError
from gammaray.types import DrafterKind, FinishReason, Proposal, TokenOrigin
from orchestrator.session import Session
from orchestrator.verdicts import TokenLogprobs, Verdict, VerifyTiming
from orchestrator.walk import Level, walk

__all__ = [
    "Cycle",
    "Drafter",
    "GammaController",
    "SessionStore",
    "Shape",
    "TokenLogprobs",
    "Verdict",
    "Verifier",
    "VerifyTiming",
    "run_cycle",
]

_log = logging.getLogger(__name__)

EMPTY = Proposal()


@dataclass(frozen=True)
class Shape:
    """What a proposal may look like.

    Args:
        depth: Upper bound of the longest path, in tokens: gamma. 0 is plain decoding.
        max_nodes: Upper bound of nodes; up to `depth` it means a chain, above it a tree may come.
        reason: Why the controller chose it.
        is_fallback: Whether the drafter that the request allows cannot propose.
        stop_threshold: A chain ends before a token that the draft believes is less likely accepted; 0: never.
    """

    depth: int
    max_nodes: int = 0
    reason: str = field(default="", compare=False)
    is_fallback: bool = field(default=False, compare=False)
    stop_threshold: float = field(default=0.0, compare=False)

    def clipped(self, depth: int) -> Shape:
        """Return the shape with at most `depth` levels."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True)
class Cycle:
    """What one cycle did.

    Args:
        gamma: Depth of the proposal that was asked for.
        num_drafted: Nodes of the proposal that was verified; 0 after a failed propose.
        num_tested: Proposed tokens put to the test.
        num_accepted: Proposed tokens that the target agreed with, those behind the cut included.
        token_ids: The emitted tokens, at least one.
        origins: Where each came from.
        logprobs: One per emitted token when asked for, else empty.
        text: Text that became complete.
        finish_reason: Set when this cycle ended the completion.
        draft_s: Seconds waited for the proposal.
        verify_s: Seconds waited for the verdict.
        total_s: Seconds of the whole cycle.
        is_first: Whether it was the session's first cycle, whose waits contain the prefill.
        draft_failed: Whether the drafter failed or was late.
        shape: What was asked for, with the controller's reason; its depth is `gamma`.
        levels: What verification met on its way down the proposal.
        timing: Where the target worker's time went; None when it did not say.
        drafter: Who proposed; NONE when nothing was proposed.
        draft_worker: Address of the draft worker that proposed, "" for none.
        is_fallback: Whether the drafter that the request allows could not propose.
        is_prepared: Whether the proposal was there before it was asked for.
        started: `time.perf_counter()` at its beginning.
    """

    gamma: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str
    finish_reason: FinishReason | None
    draft_s: float
    verify_s: float
    total_s: float
    is_first: bool
    draft_failed: bool
    shape: Shape = Shape(0)
    levels: tuple[Level, ...] = ()
    timing: VerifyTiming | None = None
    drafter: DrafterKind = DrafterKind.NONE
    draft_worker: str = ""
    is_fallback: bool = False
    is_prepared: bool = False
    started: float = 0.0


class Drafter(Protocol):
    """Proposes tokens for one session; whatever it does can only cost speed."""

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return tokens that may follow the committed ones, a chain or a tree within `shape`.

        Raises:
            GammarayError: There is no proposal this time; the cycle goes on without one.
        """


class Verifier(Protocol):
    """Verifies proposals for one session."""

    async def verify(self, session: Session, proposal: Proposal) -> Verdict:
        """Return the target's verdict on a proposal, which may be empty.

        Raises:
            InvalidArgumentError: The target refuses the proposal.
            GammarayError: No verdict; the request fails.
        """


class SessionStore(Protocol):
    """Holds what must outlive this process."""

    def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Coroutine[Any, Any, None]:
        """Store the tokens that end the session's committed ones, and its `finish_reason`.

        The session is read in the call itself and not when the result is awaited: it may move on before.

        Raises:
            FailedPreconditionError: The session has another owner by now.
            CancelledError: It was cancelled.
            UnavailableError: The store cannot be reached.
        """


class GammaController(Protocol):
    """Chooses gamma, and the width beside it."""

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""


async def run_cycle(
    session: Session, drafter: Drafter, verifier: Verifier, store: SessionStore, controller: GammaController
) -> Cycle:
    """Run one cycle and return what it did; at least one token is emitted.

    The emitted tokens are stored when this returns. A failing drafter degrades the cycle to gamma 0, which
    takes the same path. Cancelling leaves the session as it was or with whole tokens appended.

    Raises:
        GammarayError: The verifier or the store failed.
    """
    start, is_first = time.perf_counter(), session.num_emitted == 0
    shape = controller.next_shape().clipped(session.remaining - 1)  # the target's own token takes one place

    proposal = await _propose(session, drafter, shape) if shape.depth > 0 else EMPTY
    draft_failed = proposal is None
    proposed = time.perf_counter()

    proposal, verdict = await _verify(session, verifier, EMPTY if proposal is None else proposal)
    verified = time.perf_counter()

    token_ids, origins = _emitted(session, proposal, verdict)
    kept = session.commit(token_ids)
    text = session.text.take(final=session.finish_reason is not None)
    await store.append(session, token_ids[:kept], origins[:kept], verdict.logprobs[:kept])

    cycle = Cycle(
        gamma=shape.depth,
        num_drafted=len(proposal),
        num_tested=verdict.num_tested,
        num_accepted=len(verdict.accepted_path),
        token_ids=token_ids[:kept],
        origins=origins[:kept],
        logprobs=verdict.logprobs[:kept],
        text=text,
        finish_reason=session.finish_reason,
        draft_s=proposed - start,
        verify_s=verified - proposed,
        total_s=time.perf_counter() - start,
        is_first=is_first,
        draft_failed=draft_failed,
        shape=shape,
        levels=walk(proposal, verdict.accepted_path),
        timing=verdict.timing,
        drafter=proposal.drafter if proposal else DrafterKind.NONE,
        draft_worker=proposal.worker if proposal else "",
        is_fallback=draft_failed or proposal.is_fallback or shape.is_fallback,
        is_prepared=proposal.is_prepared,
        started=start,
    )
    controller.observe(cycle)
    return cycle


async def _propose(session: Session, drafter: Drafter, shape: Shape) -> Proposal | None:
    """Return a proposal that may be verified, or None when the drafter failed."""
    try:
        proposal = await drafter.propose(session, shape)
        _check_proposal(session, proposal, shape)
    except GammarayError as error:
        _log.debug("session %s goes on without a proposal: %s", session.session_id, error)
        return None
    if session.needs_draft_distributions or proposal.draft_distributions is None:
        return proposal
    return replace(proposal, draft_distributions=None)


def _check_proposal(session: Session, proposal: Proposal, shape: Shape) -> None:
    if proposal.depth > shape.depth:
        raise InternalError(f"the drafter proposed {proposal.depth} levels, {shape.depth} were asked for")
    if len(proposal) > max(shape.depth, shape.max_nodes):
        raise InternalError(f"the drafter proposed {len(proposal)} nodes, asked for were {shape}")
    if session.needs_draft_distributions and len(proposal) > 0 and proposal.draft_distributions is None:
        raise InternalError("the drafter sent no draft distributions, which rejection verification needs")


async def _verify(session: Session, verifier: Verifier, proposal: Proposal) -> tuple[Proposal, Verdict]:
    """Return the verdict and the proposal it is about: an empty one when the target refused the given one."""
    try:
        return proposal, await verifier.verify(session, proposal)
    except InvalidArgumentError as error:
        if not proposal:
            raise
        _log.warning("session %s: the target refused a proposal: %s", session.session_id, error)
        return EMPTY, await verifier.verify(session, EMPTY)


def _emitted(
    session: Session, proposal: Proposal, verdict: Verdict
) -> tuple[tuple[int, ...], tuple[TokenOrigin, ...]]:
    """Return the tokens that a verdict emits and their origins, after checking that it fits the proposal."""
    parent = -1
    for node in verdict.accepted_path:
        if not 0 <= node < len(proposal) or _parent(proposal, node) != parent:
            raise InternalError(
                f"session {session.session_id}: {verdict.accepted_path} is no path of the proposal"
            )
        parent = node
    if session.num_top_logprobs is not None and len(verdict.logprobs) != len(verdict.accepted_path) + 1:
        raise InternalError(
            f"session {session.session_id}: {len(verdict.logprobs)} log-probabilities came back"
        )
    accepted = tuple(proposal.token_ids[node] for node in verdict.accepted_path)
    origins = (*(TokenOrigin.ACCEPTED for _ in accepted), verdict.next_origin)
    return (*accepted, verdict.next_token_id), origins


def _parent(proposal: Proposal, node: int) -> int:
    return node - 1 if proposal.parents is None else proposal.parents[node]
