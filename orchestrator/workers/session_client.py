"""One session on a worker: sends the tokens that the worker lacks, again after an eviction."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic

import grpc
from google.rpc import status_pb2

from gammaray.errors import GammarayError, InternalError
from gammaray.security.tenants import tenant_of
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.convert import sampling_to_proto
from gammaray.wire.enums import METHODS
from gammaray.wire.rpc_errors import error_from_status
from orchestrator.cycle.session import Session
from orchestrator.workers.connection import WorkerConnection
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.prefix_affinity import prefix_keys
from orchestrator.workers.protocol import BlockT, ResultT

MAX_FEEDS = 4
"""A worker that still lacks tokens after this many feeds in a row is broken; an eviction explains one."""

MAX_MESSAGE = 500
"""Characters of a worker's error message that are forwarded: they are sent in headers, which are bounded."""

PREFILL_TOKEN_S = 0.2
"""What each token that a worker has to read adds to a timeout: a model of 1.5B reads 25 tokens/s on a core.

Pings and a worker's own watch find lost and stuck workers earlier."""

_FAILURES = frozenset(code.value[0] for code in grpc.StatusCode if code is not grpc.StatusCode.OK)


class WorkerSession(Generic[BlockT, ResultT]):
    """One session on the workers of one role; a block carries only tokens that the attached worker lacks."""

    def __init__(self, pool: WorkerPool[BlockT, ResultT], spec: pb.SessionSpec) -> None:
        self._pool, self._spec = pool, spec
        self._link: WorkerConnection[BlockT, ResultT] | None = None
        self._num_known = 0
        self._base_position = 0

    def release(self, session: Session) -> None:
        """Release the session's cache on the worker; returns at once."""
        if self._link is not None:
            if self._num_known > 0:
                self._link.prefixes.add(self._keys(session))
            self._stop_listening(session)
            self._link.release(session.session_id, session.epoch)
            self._link = None

    def prefer(self, session: Session, address: str) -> None:
        """Use the worker at an address if it is usable: it may hold the session's cache."""
        link = self._pool.links.get(address)
        if link is not None and link.is_usable:
            self._attach(session, link)

    @property
    def address(self) -> str:
        """host:port of the worker in use, "" for none."""
        return self._link.address if self._link is not None else ""

    def _reading_s(self, session: Session) -> float:
        """Return the seconds that the worker may take to read the tokens that it lacks."""
        return (session.num_committed - self._num_known) * PREFILL_TOKEN_S

    def _keys(self, session: Session) -> list[int]:
        """Return the prefix keys of its text for `WorkerPool.pick`; none if it shares no caches."""
        spec = self._spec
        # What an adapter computed is of no use to others.
        salt = f"{spec.cache_salt}/{spec.adapter}" if spec.adapter else spec.cache_salt
        return prefix_keys(session.token_ids, salt) if spec.HasField("cache_salt") else []

    def _attach(self, session: Session, link: WorkerConnection[BlockT, ResultT]) -> None:
        if link is not self._link:
            self.release(session)
            self._link, self._num_known = link, 0
            link.sessions.add(session.session_id)
            self._start_listening(session, link)

    def _detach(self, session: Session) -> None:
        """Detach without a release; the worker evicts the session's cache itself, if it still runs."""
        if self._link is not None:
            self._stop_listening(session)
            self._link.sessions.discard(session.session_id)
            self._link = None

    def _listen(self, message: Any) -> None:
        """Take what the worker prepared for the session; None: no more will come."""
        raise NotImplementedError

    def _start_listening(self, session: Session, link: WorkerConnection[BlockT, ResultT]) -> None:
        before = link.listeners.get(session.session_id)
        if before is not None and before != self._listen:
            before(None)  # another owner of the session in this process
        link.listeners[session.session_id] = self._listen

    def _stop_listening(self, session: Session) -> None:
        if self._link is not None and self._link.listeners.get(session.session_id) == self._listen:
            del self._link.listeners[session.session_id]

    async def _ask(
        self,
        session: Session,
        link: WorkerConnection[BlockT, ResultT],
        timeout_s: float,
        make_block: Callable[[], BlockT],
    ) -> ResultT:
        """Send the block of `make_block`, again with more context while the worker reports missing tokens."""
        deadline = time.monotonic() + session.left_s(timeout_s)
        call = None if session.calls is None else session.calls(link.role, link.address)
        try:
            for _ in range(MAX_FEEDS):
                block = make_block()
                left_s = max(deadline - time.monotonic(), 0.001)
                block.timeout_ms = max(1, round(left_s * 1e3))
                self._fill(session, block)
                if call is not None:
                    call.sent(block)
                result = await link.call(block, left_s)
                if call is not None:
                    call.answered(result)
                outcome = result.WhichOneof("outcome")
                if outcome == "error":
                    raise failure_of(link, result.error)
                if outcome != "need":
                    if self._num_known == 0:
                        link.prefixes.add(self._keys(session))
                    return result
                if result.need.position > session.num_committed:
                    raise InternalError(
                        f"{link.role} worker asks for token {result.need.position}, ahead of the session"
                    )
                self._num_known = result.need.position
            raise InternalError(f"{link.role} worker at {link.address} lacks tokens after {MAX_FEEDS} feeds")
        except GammarayError as error:
            if call is not None:
                call.failed(error)
            raise

    def _fill(self, session: Session, block: BlockT) -> None:
        """Set the session fields of a block, and the tokens that the worker lacks."""
        block.session_id, block.epoch = session.session_id, session.epoch
        block.base_position = self._base_position = session.num_committed
        block.context.start = self._num_known
        block.context.token_ids.extend(session.token_ids[self._num_known :])
        if self._num_known == 0:
            block.spec.CopyFrom(self._spec)


def failure_of(link: WorkerConnection[BlockT, ResultT], error: pb.BlockError) -> GammarayError:
    """Return the error that a worker reports; InternalError if its code is unknown."""
    message = error.message[:MAX_MESSAGE]
    if error.code in _FAILURES:
        return error_from_status(status_pb2.Status(code=error.code, message=message))
    return InternalError(f"the {link.role} worker at {link.address} failed with code {error.code}: {message}")


def session_spec(session: Session, eos_token_ids: frozenset[int], *, shares_caches: bool) -> pb.SessionSpec:
    """Return the parameters of a session that workers need in addition to its tokens."""
    # Caches are never shared between tenants: the time to first token would reveal another tenant's prompts.
    salt = f"{tenant_of(session.session_id)}:{session.cache_salt}"
    return pb.SessionSpec(
        sampling=sampling_to_proto(session.params),
        verification=METHODS[session.method],
        prompt_length=len(session.prompt),
        eos_token_ids=sorted(eos_token_ids | session.stop_token_ids),
        cache_salt=salt if shares_caches else None,
        adapter=session.adapter,
        no_learning=not session.is_stored,
    )
