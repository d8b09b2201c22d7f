"""Drafter of one session, on a draft worker, and on another one when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from enum import Enum
from functools import partial

from gammaray.errors import DeadlineExceededError, GammarayError, InternalError, UnavailableError
from gammaray.types import Proposal
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.convert import proposal_from_proto
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Shape
from orchestrator.workers.backoff import Backoff
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.proposal_cache import ProposalCache
from orchestrator.workers.session_client import WorkerSession

__all__ = ["Readiness", "RemoteDrafter"]

LONG_CONTEXT = 64
"""Tokens that a draft worker lacks from which on the cycle does not wait for it to read them."""


class Readiness(Enum):
    """Whether a draft worker can propose for a session now."""

    READY = "ready"
    READING = "reading"
    ABSENT = "absent"


_DraftLink = WorkerConnection[draft_pb.ProposeBlock, draft_pb.ProposeResult]


class RemoteDrafter(WorkerSession[draft_pb.ProposeBlock, draft_pb.ProposeResult]):
    """Proposes through a draft worker, another one when it fails; implements the cycle's Drafter.

    A worker that is late is left alone for a multiple of the time it cost, by all sessions; one that fails
    for this session only, by this one. A long prompt is fed in the background, while the target reads it too:
    until then proposals are empty, and the first token comes as early as without a drafter.

    Args:
        pool: The draft workers.
        spec: What they must know of the session.
        timeout_s: Upper bound of the deadline of one proposal, which follows what they took of late.
        prefill_timeout_s: Deadline of reading a long prompt.
        vocab_size: The target's; proposals with other tokens are refused.
    """

    def __init__(
        self,
        pool: WorkerPool[draft_pb.ProposeBlock, draft_pb.ProposeResult],
        spec: pb.SessionSpec,
        *,
        timeout_s: float,
        prefill_timeout_s: float,
        vocab_size: int,
    ) -> None:
        super().__init__(pool, spec)
        self._timeout_s, self._prefill_timeout_s = timeout_s, prefill_timeout_s
        self._vocab_size = vocab_size
        self._prepared = ProposalCache(vocab_size)
        self._shape = Shape(0)
        self._pauses: dict[str, Backoff] = {}
        self._prefill: asyncio.Task[object] | None = None

    def prepare(self, session: Session) -> Readiness:
        """Choose a worker, have it read what it lacks when that is long, and tell whether it can propose."""
        if self._prefill is not None and not self._prefill.done():
            return Readiness.READING
        link = self._link
        if link is None or not self._suits(link):
            link = self._pool.pick(self._suits, partial(self._keys, session))
        if link is None:
            return Readiness.ABSENT
        self._attach(session, link)
        if session.num_committed - self._num_known < LONG_CONTEXT:
            return Readiness.READY
        self._prefill = asyncio.create_task(self._read(session, link))
        return Readiness.READING

    async def propose(self, session: Session, shape: Shape) -> Proposal:
        """Return a proposal within `shape`, less deep near the end of the draft model's context.

        Raises:
            UnavailableError: There is no draft worker that can be used now.
            GammarayError: The worker failed or was late.
        """
        readiness = self.prepare(session)
        if readiness is Readiness.READING:
            return Proposal()
        if readiness is Readiness.ABSENT or self._link is None:
            raise UnavailableError("no draft worker can be used now")
        prepared = self._take_prepared(session, self._link, shape)
        if prepared is not None:
            return prepared
        return await self._draft(session, self._link, shape, self._link.patience.wait_s(self._timeout_s))

    def _take_prepared(self, session: Session, link: _DraftLink, shape: Shape) -> Proposal | None:
        """Return what the worker sent for this very outcome, and tell it so.

        Raises:
            GammarayError: What it sent makes no sense: it is left, as one that answers so.
        """
        try:
            proposal = self._prepared.take(session.token_ids, shape)
        except GammarayError as error:
            self._prepared.expect_nothing()
            self._note_failure(session, link, error, 0.0)
            self.release(session)
            raise
        if proposal is None:
            return None
        self._shape = shape
        block = self._block(session)
        block.is_notice = True
        self._fill(session, block)
        self._num_known = self._base_position
        self._prepared.expect(session.epoch, self._base_position)
        if session.calls is not None:
            session.calls.call(link.role, link.address).told(block)
        link.tell(block)
        return replace(proposal, worker=link.address, is_prepared=True)

    def _attach(self, session: Session, link: _DraftLink) -> None:
        if link is not self._link:
            super()._attach(session, link)
            self._prepared.expect_nothing()
            link.listeners[session.session_id] = self._prepared.put

    def _detach(self, session: Session) -> None:
        if self._link is not None:
            self._link.listeners.pop(session.session_id, None)
        super()._detach(session)

    def release(self, session: Session) -> None:
        """Free what the worker holds of the session; returns at once."""
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None
        if self._link is not None:
            self._link.listeners.pop(session.session_id, None)
        super().release(session)

    def leave(self, session: Session) -> None:
        """Let the worker keep what it holds of the session, for whoever goes on with it."""
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None
        super().leave(session)

    def _suits(self, link: _DraftLink) -> bool:
        return link.is_usable and (link.address not in self._pauses or self._pauses[link.address].ready)

    async def _read(self, session: Session, link: _DraftLink) -> None:
        """Have the worker read the committed tokens; a failure shows in the pauses."""
        with contextlib.suppress(GammarayError):
            await self._draft(session, link, Shape(1), self._prefill_timeout_s)

    async def _draft(self, session: Session, link: _DraftLink, shape: Shape, timeout_s: float) -> Proposal:
        max_context = link.info.max_context if link.info is not None else 0
        self._shape = shape.clipped(max_context - session.num_committed)
        if self._shape.depth <= 0:
            return Proposal()
        is_reading = timeout_s > self._timeout_s  # which takes longer than any proposal, and proves less
        if not is_reading:
            link.backoff.trying(self._timeout_s)
        self._prepared.expect(session.epoch, session.num_committed)
        start = time.monotonic()
        try:
            result = await self._ask(session, link, timeout_s)
            proposal = proposal_from_proto(result.proposal, self._vocab_size)
            _check_shape(proposal, self._shape)
        except GammarayError as error:
            self._note_failure(session, link, error, time.monotonic() - start)
            raise
        if not is_reading:
            link.patience.observe(time.monotonic() - start)
            self._pauses.pop(link.address, None)
            link.backoff.succeeded()
        self._num_known = self._base_position
        return replace(proposal, worker=link.address)

    def _note_failure(self, session: Session, link: _DraftLink, error: GammarayError, lost_s: float) -> None:
        if not link.is_up:
            self._detach(session)  # it will be another process when it is back
        elif session.is_overdue:
            return  # it was given too little time
        elif isinstance(error, DeadlineExceededError):
            link.backoff.failed(lost_s)  # spares the other sessions the same wait
            link.patience.observe(lost_s)
        else:
            self._pauses.setdefault(link.address, Backoff()).failed(lost_s)

    def _block(self, session: Session) -> draft_pb.ProposeBlock:
        return draft_pb.ProposeBlock(
            gamma=self._shape.depth,
            max_nodes=self._shape.max_nodes,
            stop_threshold=self._shape.stop_threshold,
            wants_ahead=True,
        )


def _check_shape(proposal: Proposal, shape: Shape) -> None:
    # The cycle refuses it, too, but then no worker is blamed and the next proposal comes from the same one.
    if proposal.depth > shape.depth or len(proposal) > max(shape.depth, shape.max_nodes):
        raise InternalError(
            f"the drafter proposed {len(proposal)} nodes in {proposal.depth} levels, asked for were {shape}"
        )
