"""Drafter of one session on a draft worker, with failover to another draft worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import partial

from gammaray.blocks import Shape
from gammaray.errors import DeadlineExceededError, GammarayError, UnavailableError
from gammaray.types import Proposal
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import proposal_from_proto, shape_to_proto
from orchestrator.cycle.run import within
from orchestrator.cycle.session import Session
from orchestrator.workers.backoff import Backoff
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.proposal_cache import ProposalCache
from orchestrator.workers.session_client import WorkerSession

LONG_CONTEXT = 64
"""If a draft worker lacks at least this many tokens, it prefills them in the background."""

_DraftLink = WorkerConnection[draft_pb.ProposeBlock, draft_pb.ProposeResult]


class Readiness(Enum):
    """Whether a draft worker can propose for a session now."""

    READY = "ready"
    READING = "reading"
    ABSENT = "absent"


class RemoteDrafter(WorkerSession[draft_pb.ProposeBlock, draft_pb.ProposeResult]):
    """Proposes through a draft worker, with failover to another one; implements the cycle's Drafter.

    All sessions avoid a late worker for a multiple of the time that it cost; a worker that fails with another
    error is avoided by this session only. A long prompt is sent in the background while the target processes
    it: until then proposals are empty, so a drafter does not delay the first token.

    Args:
        timeout_s: Upper bound of a proposal's timeout, which adapts to recent answer times.
        prefill_timeout_s: Of the prefill of a long prompt, without the seconds for its tokens.
        vocab_size: Vocabulary size of the target; proposals with other tokens are refused.
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
        self._pauses: dict[str, Backoff] = {}
        self._prefill: asyncio.Task[object] | None = None
        self._session: Session | None = None  # whose proposal is verified
        self._proposed: tuple[int, ...] = ()
        self._gamma = 0  # of the last request

    def prepare(self, session: Session) -> Readiness:
        """Choose a worker, start a prefill if it lacks many tokens, and return whether it can propose."""
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
        """Return a proposal within `shape`; near the end of the draft model's context it is less deep."""
        readiness = self.prepare(session)
        if readiness is Readiness.READING:
            return Proposal()
        if readiness is Readiness.ABSENT or self._link is None:
            raise UnavailableError("no draft worker can be used now")
        link = self._link
        if (prepared := self._take_prepared(session, link, shape)) is not None:
            return self._noted(session, prepared, shape)
        asked = self._expect(session, link, shape)
        if asked.depth <= 0:
            return Proposal()
        link.backoff.trying(self._timeout_s)
        start = time.monotonic()
        try:
            result = await self._ask(
                session, link, link.timeout.wait_s(self._timeout_s), partial(shape_to_proto, asked)
            )
            # The cycle checks this too, but without a failure on record the same worker would be used again.
            proposal = within(proposal_from_proto(result.proposal, self._vocab_size), asked)
        except GammarayError as error:
            self._note_failure(session, link, error, time.monotonic() - start)
            raise
        link.timeout.observe(time.monotonic() - start)
        self._pauses.pop(link.address, None)
        link.backoff.succeeded()
        self._num_known = self._base_position
        is_prepared = len(proposal) > 0 and result.num_forwards == 0
        return self._noted(session, replace(proposal, worker=link.address, is_prepared=is_prepared), shape)

    def _noted(self, session: Session, proposal: Proposal, shape: Shape) -> Proposal:
        """Return a proposal that is verified next, after passing on those that may follow it."""
        self._session, self._proposed, self._gamma = session, proposal.token_ids, shape.depth
        for outcome in list(self._prepared.by_outcome):
            self._pass_on(outcome)
        return proposal

    def _pass_on(self, outcome: tuple[int, ...]) -> None:
        """Let the verifier send the proposal prepared for an outcome of the verification in progress."""
        session = self._session
        if session is None or session.on_prepared is None or not is_outcome(outcome, self._proposed):
            return
        proposal = self._prepared.peek(session.token_ids, outcome)
        if proposal is not None and len(proposal) <= self._gamma:
            session.on_prepared(outcome, proposal)

    def _take_prepared(self, session: Session, link: _DraftLink, shape: Shape) -> Proposal | None:
        """Return the lookahead proposal for this cycle and notify the worker; a faulty worker is left."""
        try:
            proposal = self._prepared.take(session.token_ids, shape)
        except GammarayError as error:
            self._prepared.expect_nothing()
            self._note_failure(session, link, error, 0.0)
            self.release(session)
            raise
        if proposal is None:
            return None
        block = shape_to_proto(shape)
        block.is_notice = True
        self._fill(session, block)
        self._num_known = self._base_position
        self._prepared.expect(session.epoch, session.token_ids)
        if session.calls is not None:
            session.calls(link.role, link.address).notified(block)
        link.tell(block)
        return replace(proposal, worker=link.address, is_prepared=True)

    def _attach(self, session: Session, link: _DraftLink) -> None:
        if link is not self._link:
            super()._attach(session, link)
            self._prepared.expect_nothing()

    def _listen(self, message: draft_pb.AheadProposal | None) -> None:
        if message is not None and (outcome := self._prepared.put(message)):
            self._pass_on(outcome)

    def release(self, session: Session) -> None:
        if self._prefill is not None:
            self._prefill.cancel()
            self._prefill = None
        self._session = None
        super().release(session)

    def _suits(self, link: _DraftLink) -> bool:
        return link.is_usable and (link.address not in self._pauses or self._pauses[link.address].ready)

    async def _read(self, session: Session, link: _DraftLink) -> None:
        """Prefill the committed tokens on the worker; its time says nothing about that of a proposal."""
        asked = self._expect(session, link, Shape(1))
        if asked.depth <= 0:
            return
        start = time.monotonic()
        try:
            timeout_s = self._prefill_timeout_s + self._reading_s(session)
            await self._ask(session, link, timeout_s, partial(shape_to_proto, asked))
        except GammarayError as error:
            self._note_failure(session, link, error, time.monotonic() - start)
        else:
            self._num_known = self._base_position

    def _expect(self, session: Session, link: _DraftLink, shape: Shape) -> Shape:
        """Prepare a request and return its shape, within the draft model's context; depth 0: no room."""
        max_context = link.info.max_context if link.info is not None else 0
        asked = shape.clipped(max_context - session.num_committed)
        if asked.depth > 0:
            self._prepared.expect(session.epoch, session.token_ids)
        return asked

    def _note_failure(self, session: Session, link: _DraftLink, error: GammarayError, lost_s: float) -> None:
        if not link.is_up:
            self._detach(session)  # it may have restarted when it reconnects
        elif session.is_overdue:
            return  # the caller's deadline left it too little time
        elif isinstance(error, DeadlineExceededError):
            link.backoff.failed(lost_s)  # other sessions avoid the same wait
            link.timeout.observe(lost_s)
        else:
            self._pauses.setdefault(link.address, Backoff()).failed(lost_s)


def is_outcome(token_ids: Sequence[int], proposed: Sequence[int]) -> bool:
    """Whether one verification of a chain may emit these tokens: a part of it, then one more."""
    *accepted, last = token_ids
    num = len(accepted)
    return accepted == list(proposed[:num]) and (num == len(proposed) or last != proposed[num])
