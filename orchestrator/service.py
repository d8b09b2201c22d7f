"""The orchestrator of one replica: checks requests, runs their cycles and streams chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gammaray.config import OrchestratorSettings
from gammaray.convert import request_to_proto
from gammaray.errors import GammarayError, UnavailableError
from gammaray.otel import Telemetry
from gammaray.types import (
    Chunk,
    FinishReason,
    GenerationRequest,
    ProcessStatus,
)
from orchestrator.access import ANONYMOUS, Caller
from orchestrator.admission import Admission
from orchestrator.completion import Progress
from orchestrator.drafting import Drafting
from orchestrator.fleet import Fleet
from orchestrator.pipeline import run_cycles
from orchestrator.redis_calls import Redis, answer, connect
from orchestrator.registry import RedisRegistry
from orchestrator.remote import session_spec
from orchestrator.remote_target import RemoteVerifier
from orchestrator.requests import check_request, open_session
from orchestrator.session import Session
from orchestrator.store import RedisStore
from orchestrator.tokenizer import Tokenizer, resolve_model, served_name
from orchestrator.trace_store import RedisTraceStore
from orchestrator.tracing import Tracing, traced

__all__ = ["Orchestrator"]

_log = logging.getLogger(__name__)

SETTLE_S = 3.0
"""How long a start waits for the workers that are known to connect."""

STATUS_TIMEOUT_S = 1.0


class Orchestrator:
    """Serves generation requests with the workers it watches.

    Attributes:
        model_name: Name under which the target model is served.
        max_context: Longest prompt plus completion, in tokens.
        vocab_size: Number of token ids.
    """

    def __init__(self, settings: OrchestratorSettings, redis: Redis, tokenizer: Tokenizer) -> None:
        """Put the parts together; use `start`."""
        self.model_name = settings.served_model_name or served_name(settings.model)
        self.max_context = tokenizer.max_context
        self.vocab_size = tokenizer.vocab_size
        self._settings, self._redis, self._tokenizer = settings, redis, tokenizer
        self._store = RedisStore(redis, settings.session_ttl_s)
        self._admission = Admission(
            settings.max_concurrent_requests, settings.max_waiting_requests, settings.max_wait_s
        )
        records = RedisTraceStore(redis, settings.session_ttl_s)
        self.tracing = Tracing(Telemetry("orchestrator"), records, self.model_name)
        self._tasks: set[asyncio.Task[None]] = set()
        self._fleet = Fleet(
            RedisRegistry(redis),
            tokenizer.vocab_size,
            target_addresses=settings.target_addresses,
            draft_addresses=settings.draft_addresses,
        )
        self._drafting = Drafting(settings, self._fleet.drafts, tokenizer.vocab_size)

    @classmethod
    async def start(cls, settings: OrchestratorSettings) -> Orchestrator:
        """Connect to Redis, load the tokenizer and watch the workers.

        Raises:
            UnavailableError: Redis cannot be reached.
            InvalidArgumentError: No such model, or a worker that is there has another vocabulary.
        """
        redis = connect(settings.redis_url)
        try:
            await answer(redis.ping())
            tokenizer = await asyncio.to_thread(Tokenizer, resolve_model(settings.model))
            orchestrator = cls(settings, redis, tokenizer)
            await orchestrator._fleet.start(SETTLE_S)
        except BaseException:
            await redis.aclose()
            raise
        orchestrator._fit_context()
        return orchestrator

    @traced
    async def generate(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one completion, a chunk per cycle; closing the iterator cancels it and frees the caches.

        Raises:
            NotFoundError: Another model is asked for.
            InvalidArgumentError: Names the field that is wrong.
            ResourceExhaustedError: Too many requests run and wait; says when to come back.
            FailedPreconditionError: A session of this name exists.
            UnavailableError: No target worker or no Redis.
            DeadlineExceededError: A verification took too long.
        """
        check_request(
            request,
            model_name=self.model_name,
            vocab_size=self.vocab_size,
            max_prompt_bytes=self._settings.max_prompt_bytes,
        )
        async with self._admission.place(caller):
            self._fit_context()
            session = await open_session(request, self._tokenizer, self.max_context, caller)
            session.deadline = caller.deadline
            stored = request_to_proto(replace(request, sampling=session.params)).SerializeToString()
            await self._store.create(session, stored)
            async with contextlib.aclosing(self._run(session, request)) as chunks:
                async for chunk in chunks:
                    if caller.tenant:
                        chunk = replace(chunk, session_id=caller.public(chunk.session_id))
                    yield chunk

    async def _run(self, session: Session, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        settings = self._settings
        spec = session_spec(session, self._tokenizer.eos_token_ids)
        ladder = self._drafting.ladder(session, request, spec)
        verifier = RemoteVerifier(
            self._fleet.targets, spec, timeout_s=settings.verify_timeout_s, wait_s=settings.worker_wait_s
        )
        progress = Progress(session, self._tokenizer)
        journal = self.tracing.journal(session, self._in_background)
        cycles = run_cycles(session, ladder, verifier, self._store, journal.watch(ladder))
        try:
            with journal:
                async with contextlib.aclosing(cycles):
                    async for cycle in cycles:
                        journal.stored()
                        if cycle.finish_reason is not None:
                            ladder.release(session)
                            verifier.release(session)
                        yield progress.chunk(cycle, self._drafting.plain_cycle_s)
        except (GeneratorExit, asyncio.CancelledError):
            self._in_background(self._store.finish(session, FinishReason.CANCELLED))
            raise
        finally:
            ladder.release(session)
            verifier.release(session)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the tokenizer puts in front of it.

        Raises:
            InvalidArgumentError: Not valid Unicode.
        """
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        return self._tokenizer.decode(token_ids)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that the tokenizer's chat template makes of `messages`.

        Raises:
            InvalidArgumentError: The model has no chat template, or it refuses the messages.
        """
        return self._tokenizer.render_chat(messages)

    async def status(self) -> list[ProcessStatus]:
        """Return the state of this orchestrator, its workers and Redis."""
        own = ProcessStatus(
            "orchestrator", os.getpid(), "", self.model_name, True, self._admission.num_running
        )
        return [own, *self._fleet.status(), await self._redis_status()]

    async def close(self) -> None:
        """Close every connection; requests in flight fail with UnavailableError."""
        await self._fleet.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.tracing.shutdown()
        await self._redis.aclose()

    def _fit_context(self) -> None:
        """Workers may be set to less context than the model has."""
        self.max_context = min(self._tokenizer.max_context, self._fleet.max_context or 2**31)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except GammarayError as error:
                _log.warning("a cancelled session could not be marked in the store: %s", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _redis_status(self) -> ProcessStatus:
        where = self._redis.connection_pool.connection_kwargs
        address = f"{where.get('host', '')}:{where.get('port', '')}"
        try:
            info = await asyncio.wait_for(answer(self._redis.info("server")), STATUS_TIMEOUT_S)
        except (UnavailableError, asyncio.TimeoutError):
            return ProcessStatus("redis", 0, address, "", False, 0)
        return ProcessStatus("redis", int(info.get("process_id", 0)), address, "", True, 0)
