"""The orchestrator of one replica: checks requests, runs their cycles and streams chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gammaray.config import OrchestratorSettings
from gammaray.errors import CancelledError, GammarayError, NotFoundError
from gammaray.security.tls import tls_files
from gammaray.telemetry.otel import Telemetry
from gammaray.types import (
    Chunk,
    FinishReason,
    GenerationRequest,
    ProcessStatus,
)
from orchestrator.access.admission import Admission
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.cycle.handover import SessionHandover
from orchestrator.cycle.pipeline import run_cycles
from orchestrator.drafting.factory import Drafting
from orchestrator.drafting.fallback import FallbackDrafter
from orchestrator.sessions.leases import LeaseManager
from orchestrator.sessions.lifecycle import OpenSession, SessionManager, check_request
from orchestrator.sessions.management import SessionCalls
from orchestrator.sessions.progress import ChunkBuilder
from orchestrator.status import StatusBoard
from orchestrator.storage.client import Redis, connect, wait_for_redis
from orchestrator.storage.keys import StoreBounds
from orchestrator.storage.registry import RedisRegistry
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.telemetry.metrics import OrchestratorMeter, metered
from orchestrator.telemetry.tracing import Tracing, traced
from orchestrator.text.tokenizer import Tokenizer, resolve_model, served_name
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import FencedVerifier, RemoteVerifier, check_served

__all__ = ["Orchestrator"]

_log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""Seconds that `start` waits for known workers to connect."""

HERITAGE_PERIOD = 4
"""Cycles between two writes of a session's handover."""


class Orchestrator:
    """Serves generation requests with the registered workers.

    Attributes:
        model_name: Name under which the target model is served.
        max_context: Longest prompt plus completion, in tokens.
        vocab_size: Number of token ids.
        tokenizer: The target model's tokenizer.
        store: The sessions in Redis.
        admission: Running and waiting requests.
        fleet: The draft and target workers.
        leases: Renewal and reaping of session leases.
        sessions: Calls of clients about their sessions.
    """

    def __init__(self, settings: OrchestratorSettings, redis: Redis, tokenizer: Tokenizer) -> None:
        """Create the components; use `start` instead."""
        self.model_name = settings.served_model_name or served_name(settings.model)
        self.max_context = tokenizer.max_context
        self.vocab_size = tokenizer.vocab_size
        self._settings, self._redis, self.tokenizer = settings, redis, tokenizer
        bounds = StoreBounds(redis, settings.max_stored_mb * 2**20, settings.max_tenant_stored_share)
        self.store = RedisStore(redis, settings.session_ttl_s, bounds=bounds)
        self.admission = Admission(
            settings.max_concurrent_requests,
            settings.max_waiting_requests,
            settings.max_wait_s,
            math.ceil(settings.max_tenant_share * settings.max_concurrent_requests),
        )
        records = RedisTraceStore(redis, settings.session_ttl_s, bounds)
        self.meter = OrchestratorMeter()
        self.tracing = Tracing(Telemetry("orchestrator"), records, self.model_name)
        self._tasks: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(
            RedisRegistry(redis),
            tokenizer.vocab_size,
            vocab_sha256=tokenizer.vocab_sha256,
            target_addresses=settings.target_addresses,
            draft_addresses=settings.draft_addresses,
            tls=tls_files(settings),
        )
        self._opener = SessionManager(self.store, tokenizer, self._check_model)
        self._drafting = Drafting(settings, self.fleet.drafts, tokenizer.vocab_size)
        self._board = StatusBoard(self.meter, self.admission, self.fleet, redis, self.model_name)
        self.leases = LeaseManager(self.store, self.fleet.release)
        self.sessions = SessionCalls(self.store, tokenizer, self.fleet.release, records)

    @classmethod
    async def start(cls, settings: OrchestratorSettings) -> Orchestrator:
        """Connect to Redis, load the tokenizer and watch the workers.

        Raises:
            UnavailableError: Redis cannot be reached within `redis_wait_s`.
            InvalidArgumentError: The model does not exist, a connected worker has another vocabulary, or the
                URL is that of a Redis Cluster.
        """
        await wait_for_redis(settings.redis_login_url, settings.redis_wait_s)
        redis = connect(settings.redis_login_url)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, resolve_model(settings.model))
            orchestrator = cls(settings, redis, tokenizer)
            await orchestrator.fleet.start(SETTLE_S)
            await orchestrator._board.start(settings.metrics_listen)
        except BaseException:
            await redis.aclose()
            raise
        orchestrator._fit_context()
        orchestrator.leases.start()
        return orchestrator

    @property
    def num_requests(self) -> int:
        """Number of running and waiting requests."""
        return self.admission.num_running + self.admission.num_waiting

    @metered
    @traced
    async def generate(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one completion, one chunk per cycle; closing the iterator cancels it and frees the caches.

        Raises:
            NotFoundError: The request names another model.
            InvalidArgumentError: Names the field that is wrong.
            ResourceExhaustedError: Too many requests run and wait, or too much is stored; has a retry delay.
            FailedPreconditionError: A session of this name exists.
            ModelChangedError: The session's target model is not served any more.
            UnavailableError: No target worker or no Redis.
            DeadlineExceededError: A verification took too long.
        """
        await check_request(
            request,
            model_name=self.model_name,
            vocab_size=self.vocab_size,
            max_prompt_bytes=self._settings.max_prompt_bytes,
            max_context=self.tokenizer.max_context,
        )
        async with self.admission.place(caller):
            self._fit_context()
            opened = await self._opener.open(request, self.max_context, caller)
            opened.session.deadline = caller.deadline
            async with contextlib.aclosing(self._stream(opened)) as chunks:
                async for chunk in chunks:
                    if caller.tenant:
                        chunk = replace(chunk, session_id=caller.public(chunk.session_id))
                    yield chunk

    async def _stream(self, opened: OpenSession) -> AsyncGenerator[Chunk, None]:
        """Yield the committed tokens that the client lacks, then those that new cycles emit."""
        session, handover = opened.session, opened.handover
        progress = ChunkBuilder(session, self.tokenizer, opened.offset, handover.counters, handover.elapsed_s)
        has_ended = False
        try:
            with self.leases.holding(session):
                async with contextlib.aclosing(opened.replay(progress)) as missed:
                    async for chunk in missed:
                        yield chunk
                if session.finish_reason is None:
                    async with contextlib.aclosing(self._run(opened, progress)) as chunks:
                        async for chunk in chunks:
                            has_ended = chunk.finish_reason is not None
                            yield chunk
        finally:
            if opened.ended is None and not has_ended:
                self.leases.let_go(session)

    async def _run(self, opened: OpenSession, progress: ChunkBuilder) -> AsyncGenerator[Chunk, None]:
        settings, session = self._settings, opened.session
        spec = session_spec(session, self.tokenizer.eos_token_ids, shares_caches=settings.prefix_caching)
        ladder = self._drafting.ladder(session, opened.request, spec)
        verifier = RemoteVerifier(
            self.fleet.targets, spec, timeout_s=settings.verify_timeout_s, wait_s=settings.worker_wait_s
        )
        ladder.recall(opened.handover)
        verifier.prefer(session, opened.handover.target)
        fenced = FencedVerifier(verifier, self.store.renew)
        cycle_log = self.tracing.cycle_log(session, self._in_background)
        cycles = run_cycles(session, ladder, fenced, self.store, cycle_log.watch(ladder))
        try:
            with cycle_log:
                async with contextlib.aclosing(cycles):
                    async for cycle in cycles:
                        cycle_log.stored()
                        plain_cycle_s = self._drafting.plain_cycle_s
                        self.meter.cycle(cycle, plain_cycle_s)
                        if cycle.finish_reason is not None:
                            self._free(opened, ladder, verifier)
                        chunk = progress.chunk(cycle, plain_cycle_s)
                        if progress.counters.cycles % HERITAGE_PERIOD == 1:
                            session.state = _handover(progress, ladder, verifier).to_bytes()
                        yield chunk
        except CancelledError:
            yield progress.piece((), "", FinishReason.CANCELLED)
        except NotFoundError:  # deleted; workers may have received its tokens again since they dropped it
            self.fleet.release(session.session_id, session.epoch, forget=True)
            raise
        finally:
            session.state = _handover(progress, ladder, verifier).to_bytes()
            ladder.release(session)
            verifier.release(session)

    def _free(self, opened: OpenSession, ladder: FallbackDrafter, verifier: RemoteVerifier) -> None:
        """Free the workers' caches of an ended turn, now or after the request's `keep_cache_s`."""
        session, keep_s = opened.session, opened.request.keep_cache_s
        if keep_s > 0:
            ladder.leave(session)
            verifier.leave(session)
            self.leases.release_later(session, keep_s)
        else:
            ladder.release(session)
            verifier.release(session)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the tokenizer prepends.

        Raises:
            InvalidArgumentError: Not valid Unicode.
        """
        return self.tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        return self.tokenizer.decode(token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token as bytes: it may be part of a character."""
        return self.tokenizer.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is special, which decoded text leaves out."""
        return self.tokenizer.is_special(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that the tokenizer's chat template makes of `messages`.

        Raises:
            InvalidArgumentError: The model has no chat template, or the template refuses the messages.
        """
        return self.tokenizer.render_chat(messages)

    async def status(self) -> list[ProcessStatus]:
        """Return the state of this orchestrator, the other orchestrators, the workers and Redis."""
        return await self._board.all()

    async def close(self) -> None:
        """Close every connection; requests in flight fail with UnavailableError."""
        await self._board.stop()
        await self.fleet.close()
        await self.leases.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.tracing.shutdown()
        await self._redis.aclose()

    async def _check_model(self, session_id: str, identity: str, left_s: float) -> None:
        if identity:
            wait_s = max(0.0, min(left_s, self._settings.worker_wait_s))
            await check_served(self.fleet.targets, session_id, identity, wait_s)

    def _fit_context(self) -> None:
        """Limit the context to the workers', which may be configured below the model's."""
        self.max_context = min(self.tokenizer.max_context, self.fleet.max_context or 2**31)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except GammarayError as error:
                _log.warning("a cancelled session could not be marked in the store: %s", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _handover(progress: ChunkBuilder, ladder: FallbackDrafter, verifier: RemoteVerifier) -> SessionHandover:
    return SessionHandover(
        counters=progress.counters,
        elapsed_s=progress.elapsed_s,
        acceptance=ladder.acceptance,
        target=verifier.address,
        draft=ladder.draft_address,
    )
