"""Verifier of one session on one target worker at a time, with failover to another one of the same model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gammaray.blocks import MAX_AHEAD, Verdict
from gammaray.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    GammarayError,
    InternalError,
    ModelChangedError,
    UnavailableError,
)
from gammaray.grammar.matcher import grammar_identity
from gammaray.security.tenants import name_of
from gammaray.types import PromptLogprobs, Proposal
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import prompt_logprobs_from_proto, proposal_to_proto, verdict_from_proto
from orchestrator.cycle.protocols import Verifier
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import EMPTY, PLAIN, Draft, DraftHere
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread
from orchestrator.workers.ahead_tokens import CROWD, NOTHING, AheadCache
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.early_blocks import LEAST_PROTOCOL, EarlyBlocks
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.session_client import WorkerSession, failure_of

TRIES = 5
"""Attempts per cycle that may be answered with CANCELLED before the session fails."""

VERIFY_TIMEOUT_S = 60.0
"""Seconds until a verification times out, without those for the tokens that its worker has to read."""

RETRY_PAUSE_S = 0.05
"""Seconds before further attempts when target workers fail at once; the first other one is tried without."""

TargetLink = WorkerConnection[target_pb.VerifyBlock, target_pb.VerifyResult]
TargetPool = WorkerPool[target_pb.VerifyBlock, target_pb.VerifyResult]


class FencedVerifier:
    """Checks ownership in the store after CANCELLED answers; implements the cycle's Verifier.

    A worker answers CANCELLED when the session was released: it was cancelled or deleted, or its owner was
    considered dead. The store knows which; in the last case the block is sent again, up to `TRIES` times.
    Only the store decides whether a session was cancelled, never a worker's answer.

    Args:
        renew: Renews the lease; raises if the session cannot be continued.
    """

    def __init__(self, verifier: Verifier, renew: Callable[[Session], Awaitable[None]]) -> None:
        self._verifier, self._renew = verifier, renew

    async def verify(self, session: Session, draft: Draft) -> Verdict:
        """Return the target's verdict.

        Raises:
            CancelledError: The session was cancelled.
            FailedPreconditionError: The session has another owner by now.
            UnavailableError: Workers keep dropping the session although the caller owns it.
            GammarayError: As raised by the wrapped verifier.
        """
        for _ in range(TRIES):
            try:
                return await self._verifier.verify(session, draft)
            except CancelledError as error:
                dropped = error
            await self._renew(session)
        raise UnavailableError(
            f"session {name_of(session.session_id)}: workers dropped it {TRIES} times in one cycle, "
            f"last: {dropped}"
        )


def info_of(link: WorkerConnection[Any, Any]) -> target_pb.GetTargetInfoResponse:
    """Return the worker's last info; an empty one if it is unknown."""
    info = link.info
    return info if isinstance(info, target_pb.GetTargetInfoResponse) else target_pb.GetTargetInfoResponse()


def identity_of(link: WorkerConnection[Any, Any], adapter: str = "") -> str:
    """Return the identity in the worker's last info, of its model with that adapter; empty if unknown."""
    return info_of(link).adapters.get(adapter, "") if adapter else info_of(link).model_identity


def has_head(link: WorkerConnection[Any, Any]) -> bool:
    """Return whether the worker's last info names a head that drafts there."""
    return info_of(link).head != ""


def takes_trees(link: WorkerConnection[Any, Any]) -> bool:
    """Return whether the worker's last info says that it verifies trees."""
    return info_of(link).takes_trees


def of_identity(identity: str, grammars: str = "", adapter: str = "") -> Callable[[TargetLink], bool]:
    """Return a predicate: whether a worker may continue a session; empty arguments suit any worker.

    Without an adapter, `identity` may be that of the model with any of the worker's adapters. `grammars` is
    the identity of the orchestrator's grammar library, for a session with a grammar.
    """

    def suits(link: TargetLink) -> bool:
        if _differs(info_of(link).grammar_identity, grammars):
            return False
        adapters = info_of(link).adapters
        if adapter:
            return adapter in adapters and identity in ("", adapters[adapter])
        return not identity or identity_of(link) == identity or identity in adapters.values()

    return suits


def _differs(theirs: str, own: str) -> bool:
    return bool(theirs and own and theirs != own)


def check_grammars(pool: TargetPool, own: str) -> None:
    """Refuse if no connected target worker has this orchestrator's grammar library."""
    others = {info_of(link).grammar_identity for link in pool.links.values() if link.is_up}
    if others and all(_differs(other, own) for other in others):
        raise FailedPreconditionError(
            f"grammar: got target workers with {', '.join(sorted(others))}, whose masks may differ; "
            f"allowed: the grammar library of this orchestrator, {own}"
        )


async def check_served(pool: TargetPool, session_id: str, identity: str, timeout_s: float) -> None:
    """Check that a session's model is served, before the session is taken over or gets a new turn.

    If only other models are served, waits up to `timeout_s` for a worker of the session's model. Without any
    target worker the check passes, as nothing is known yet.

    Raises:
        ModelChangedError: All connected target workers serve other models.
        UnavailableError: A worker of its model is connected but draining, or all workers disconnected.
    """
    if pool.pick_any(of_identity(identity)) is not None or pool.pick_any() is None:
        return
    try:
        await pool.wait(timeout_s, of_identity(identity))
    except UnavailableError as error:
        raise no_worker_error(pool, session_id, identity, error) from None


def no_worker_error(
    pool: TargetPool, session_id: str, identity: str, error: UnavailableError
) -> GammarayError:
    """Return ModelChangedError if only other models are served, else `error`."""
    up = [link for link in pool.links.values() if link.is_up]
    others = {name for link in up for name in (identity_of(link), *info_of(link).adapters.values())}
    if not identity or not others or identity in others:
        return error
    return ModelChangedError(session_id, identity, sorted(others))


class RemoteVerifier(WorkerSession[target_pb.VerifyBlock, target_pb.VerifyResult]):
    """Verifies through a target worker; after `timeout_s`, prefill not counted, through another."""

    def __init__(self, pool: TargetPool, spec: pb.SessionSpec, *, timeout_s: float, wait_s: float) -> None:
        super().__init__(pool, spec)
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._ahead, self._early = AheadCache(), EarlyBlocks()
        self._identity = ""
        self._grammars = grammar_identity() if spec.sampling.grammar else ""

    def prefer(self, session: Session, address: str) -> None:
        """Use the worker at an address if it is usable and serves the session's model."""
        link = self._pool.links.get(address)
        if link is not None and self._suits(session)(link):
            super().prefer(session, address)

    async def reach(self, session: Session) -> None:
        """Choose the worker of the next verification, for which `verify` then does not wait."""
        self._attach(session, await self._choose(session, self._wait_s))

    async def verify(self, session: Session, draft: Draft) -> Verdict:
        """Return the target's verdict.

        Raises:
            UnavailableError: No target worker within `wait_s`, or workers keep failing.
            FailedPreconditionError: The session has a grammar, and the workers have another grammar library.
            ModelChangedError: The connected workers serve other models than the session's.
            GammarayError: The error that the worker answered.
        """
        deadline: float | None = None
        while True:
            left_s = self._wait_s if deadline is None else max(0.0, deadline - time.monotonic())
            link = await self._choose(session, left_s)
            self._attach(session, link)
            # The worker compares it, too: it may have been replaced by another process at the same address.
            self._identity = session.model_identity or identity_of(link, session.adapter)
            session.has_head, session.takes_trees = has_head(link), takes_trees(link)
            sent, path = _sent(draft, takes_trees=session.takes_trees)
            start = time.monotonic()
            try:
                is_plain = not isinstance(sent, DraftHere) and not sent
                if is_plain and (verdict := await self._decoded_ahead(session, link)) is not None:
                    return verdict
                early = None
                if path is None and not isinstance(sent, DraftHere):
                    early = await self._answered_early(session, link, sent)
                if early is not None:
                    result, sent = early
                else:
                    block = partial(self._block, session, link, sent)
                    result = await self._ask(session, link, self._timeout_s + self._reading_s(session), block)
            except (UnavailableError, DeadlineExceededError) as error:
                session.left_s(0)  # raises past the caller's deadline: failover would not help
                self._leave(session, link, error, time.monotonic() - start)
                pause_s, now = 0.0 if deadline is None else RETRY_PAUSE_S, time.monotonic()
                deadline = deadline or now + self._wait_s
                if now >= deadline:
                    raise
                await asyncio.sleep(pause_s)
                continue
            link.backoff.succeeded()
            link.batch_size = result.timing.batch_size
            if not result.is_followed:
                self._ahead.expect(NOTHING, 0)
            # The worker's cache holds the accepted tokens; the token it sampled last was not fed yet.
            self._num_known = self._base_position + len(result.verdict.accepted_path)
            verdict = _verdict(session, link, result, sent, path)
            if early is not None:
                verdict = replace(verdict, drafted=early[1])
            session.model_identity = self._identity
            if session.lacks_prompt_logprobs:
                prompt = result.verdict.prompt_logprobs
                if len(prompt.logprobs) + len(prompt.top_logprobs) <= INLINE_NUMBERS:
                    session.prompt_logprobs = _prompt_logprobs(session, link, result.verdict)
                else:
                    session.prompt_logprobs = await in_thread(_prompt_logprobs, session, link, result.verdict)
            if session.num_emitted == 0:
                session.num_cached = min(result.timing.cached_tokens, len(session.prompt))
            return verdict

    def _block(self, session: Session, link: TargetLink, draft: Draft) -> target_pb.VerifyBlock:
        is_crowd = max(len(link.sessions), link.batch_size) >= CROWD
        block = _block(session, draft, min(MAX_AHEAD, session.remaining - 1) if is_crowd else 0)
        self._ahead.expect(block if block.num_ahead else NOTHING, session.num_committed + 1)
        if block.num_ahead:  # another owner in this process may have taken its place
            self._start_listening(session, link)
        self._early.begin(session)
        asyncio.get_running_loop().call_soon(self._send_early, session)  # after this block
        return block

    def _send_early(self, session: Session) -> None:
        """Send the next cycle's blocks for the outcomes whose proposals are here."""
        if (link := self._link) is not None and link.is_up:
            for outcome, proposal in self._early.wanted(session):
                block = _block(session, proposal, num_ahead=0)
                block.timeout_ms = round(self._timeout_s * 1e3)
                if session.calls is not None and (parent := session.calls(link.role, link.address).following):
                    block.trace.traceparent = parent
                self._early.send(session, link, outcome, proposal, block)

    def _take_prepared(self, session: Session, outcome: Sequence[int], proposal: Proposal) -> None:
        self._early.offer(session, outcome, proposal)
        self._send_early(session)

    async def _answered_early(
        self, session: Session, link: TargetLink, proposal: Proposal
    ) -> tuple[target_pb.VerifyResult, Proposal] | None:
        """Return the answer to this cycle's block, and its proposal, if it was sent early and is served."""
        early = self._early.take(session, proposal)
        if early is None:
            return None
        self._early.begin(session)
        self._send_early(session)
        call = None if session.calls is None else session.calls(link.role, link.address)
        if call is not None:
            call.sent(early.block)
        await link.wait(early.answer, session.left_s(self._timeout_s))
        result = early.answer.result()
        if call is not None:
            call.answered(result)
        if result.WhichOneof("outcome") != "verdict":
            return None
        self._base_position = session.num_committed
        return result, replace(proposal, token_ids=early.proposal.token_ids)

    async def _decoded_ahead(self, session: Session, link: TargetLink) -> Verdict | None:
        """Return what the worker has decoded ahead, after waiting for it if it is on its way."""
        ahead = self._ahead
        if not ahead.follow(session.num_committed):
            return None
        if (arrival := ahead.arrival()) is not None:
            await link.wait(arrival, session.left_s(self._timeout_s))
        has_logprobs = session.num_top_logprobs is not None
        verdict = ahead.take(info_of(link).vocab_size, has_logprobs=has_logprobs)
        if verdict is None and ahead.error is not None:
            error = ahead.error
            ahead.expect(NOTHING, 0)
            raise failure_of(link, error)
        if verdict is not None:
            self._num_known = session.num_committed
            if session.calls is not None:
                session.calls(link.role, link.address).answered(ahead.last)
        return verdict

    def _listen(self, message: target_pb.AheadTokens | None) -> None:
        self._ahead.put(message)

    def _attach(self, session: Session, link: TargetLink) -> None:
        if link is not self._link:
            self._ahead.expect(NOTHING, 0)
            self._early = EarlyBlocks()
            takes_early = info_of(link).protocol >= LEAST_PROTOCOL
            session.on_prepared = partial(self._take_prepared, session) if takes_early else None
        super()._attach(session, link)

    async def _choose(self, session: Session, timeout_s: float) -> TargetLink:
        """Return the worker in use if it is usable, else another one of the session's model."""
        suits = self._suits(session)
        link = self._link
        if link is not None and link.is_up and not link.is_draining and suits(link):
            return link
        try:
            return await self._pool.wait(session.left_s(timeout_s), suits, partial(self._keys, session))
        except UnavailableError as error:
            check_grammars(self._pool, self._grammars)
            raise no_worker_error(self._pool, session.session_id, session.model_identity, error) from None

    def _suits(self, session: Session) -> Callable[[TargetLink], bool]:
        return of_identity(session.model_identity, self._grammars, session.adapter)

    def _fill(self, session: Session, block: target_pb.VerifyBlock) -> None:
        super()._fill(session, block)
        if block.HasField("spec"):
            block.spec.model_identity = self._identity

    def _leave(self, session: Session, link: TargetLink, error: GammarayError, lost_s: float) -> None:
        """Detach the session from a worker that failed; raise if it is late and there is no other one."""
        if link.is_up:
            self.release(session)
        else:
            self._detach(session)
        link.prefixes.clear()  # its cached prefixes must not attract the next attempt
        if isinstance(error, DeadlineExceededError):
            link.backoff.failed(lost_s)
            if self._pool.pick(self._suits(session)) is None:
                raise error


def _sent(draft: Draft, *, takes_trees: bool) -> tuple[Draft, tuple[int, ...] | None]:
    """Return what a worker is sent of a draft, and the indexes of the sent nodes; None: all of them.

    A worker that takes chains only gets the first path of a tree.
    """
    if takes_trees:
        return draft, None
    if isinstance(draft, DraftHere):
        return DraftHere(draft.shape.chain), None
    if draft.parents is None:
        return draft, None
    path = draft.first_path()
    return draft.path(path), path


def _block(session: Session, draft: Draft, num_ahead: int) -> target_pb.VerifyBlock:
    shape, proposal = (draft.shape, EMPTY) if isinstance(draft, DraftHere) else (PLAIN, draft)
    head = target_pb.HeadDraft(gamma=shape.depth, max_nodes=shape.max_nodes) if session.uses_head else None
    return target_pb.VerifyBlock(
        head=head,
        proposal=proposal_to_proto(proposal),
        num_top_logprobs=session.num_top_logprobs,
        num_ahead=num_ahead,
        num_prompt_logprobs=session.num_prompt_logprobs if session.lacks_prompt_logprobs else None,
    )


def _verdict(
    session: Session,
    link: TargetLink,
    result: target_pb.VerifyResult,
    sent: Draft,
    path: tuple[int, ...] | None,
) -> Verdict:
    """Return the verdict of a result, on the nodes of the whole draft, after validating it."""
    has_logprobs = session.num_top_logprobs is not None
    try:
        verdict = verdict_from_proto(result, info_of(link).vocab_size, has_logprobs=has_logprobs)
    except InternalError as error:
        raise InternalError(f"target worker at {link.address}: {error}") from None
    verified = verdict.drafted or EMPTY if isinstance(sent, DraftHere) else sent
    if verdict.num_tested > len(verified):
        raise InternalError(f"the target worker at {link.address} sent an invalid verdict")
    if path is None:
        return verdict
    if any(node >= len(path) for node in verdict.accepted_path):
        raise InternalError(f"the target worker at {link.address} sent an invalid verdict")
    return replace(verdict, accepted_path=tuple(path[node] for node in verdict.accepted_path))


def _prompt_logprobs(session: Session, link: TargetLink, verdict: target_pb.Verdict) -> PromptLogprobs:
    found = prompt_logprobs_from_proto(verdict.prompt_logprobs, session.prompt)
    is_known = max(found.top_token_ids, default=0) < info_of(link).vocab_size
    if found.num_top > (session.num_prompt_logprobs or 0) or not is_known:
        raise InternalError(f"the target worker at {link.address} sent invalid log-probabilities")
    return found
