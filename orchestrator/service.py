"""The orchestrator of one replica: checks requests, runs their cycles and streams chunks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

from gammaray.aio import BackgroundTasks, end_tasks
from gammaray.config import OrchestratorSettings
from gammaray.demo_pair import resolve_model
from gammaray.deploy.redis_connection import RetryingRedis
from gammaray.errors import CancelledError
from gammaray.grammar.matcher import GrammarState, grammar_identity
from gammaray.security.tenants import name_of
from gammaray.security.tls import tls_files
from gammaray.telemetry.otel import Telemetry
from gammaray.types import Chunk, DrafterKind, GenerationRequest, ProcessStatus
from orchestrator.access.admission import Admission
from orchestrator.access.caller import ANONYMOUS, TENANT_SHARE, Caller
from orchestrator.cycle.session import Session
from orchestrator.drafting.factory import Drafting
from orchestrator.grammar_checks import GrammarChecks
from orchestrator.sessions.leases import LeaseManager, repeat
from orchestrator.sessions.lifecycle import OpenSession, SessionManager, check_request
from orchestrator.sessions.management import SessionCalls
from orchestrator.sessions.progress import ChunkBuilder
from orchestrator.sessions.receipts import ReceiptIssuer
from orchestrator.status import StatusBoard
from orchestrator.storage.client import connect, wait_for_redis
from orchestrator.storage.keys import Keys, StoreBounds
from orchestrator.storage.registry import RedisRegistry
from orchestrator.storage.response_store import ResponseStore
from orchestrator.storage.session_store import RedisStore
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.storage.unstored import UnstoredSessions
from orchestrator.telemetry.metrics import OrchestratorMeter
from orchestrator.telemetry.tracing import RequestSpan, Tracing
from orchestrator.text.tokenizer import Tokenizer, served_name
from orchestrator.turn import RunningTurn
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import VERIFY_TIMEOUT_S, RemoteVerifier, check_grammars, check_served

_log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Seconds that `start` waits for known workers to connect."""

REDIS_WAIT_S = 60.0
"""Seconds that `start` waits for Redis, which may start at the same time and load its data first."""

WORKER_WAIT_S = 30.0
"""Seconds that a request waits for a target worker to connect: clients of a lost worker then resume."""

MAX_WAIT_S = 30.0
"""Seconds that a request waits in the queue before it is rejected: as long as for a target worker."""

FORGET_PERIOD_S = 5.0
"""Seconds between two checks for sessions that another replica deleted, whose outputs are forgotten."""


class Orchestrator:
    """Serves generation requests with the registered workers."""

    def __init__(self, settings: OrchestratorSettings, redis: RetryingRedis, tokenizer: Tokenizer) -> None:
        """Create the components; use `start` instead."""
        self.model_name = settings.served_model_name or served_name(settings.model)
        self.max_context = tokenizer.max_context  # longest prompt plus completion, in tokens
        self.vocab_size = tokenizer.vocab_size
        self._settings, self._redis, self.tokenizer = settings, redis, tokenizer
        bounds = StoreBounds(redis)
        keys = Keys(settings.redis_prefix)
        self.store = RedisStore(redis, settings.session_ttl_s, bounds=bounds, keys=keys)
        self.unstored = UnstoredSessions()  # takes the place of `store` for completions that are not stored
        self.responses = ResponseStore(redis, settings.session_ttl_s, bounds, keys)
        self.admission = Admission(
            settings.max_concurrent_requests,
            settings.max_concurrent_requests,  # as many may wait
            MAX_WAIT_S,
            math.ceil(TENANT_SHARE * settings.max_concurrent_requests),
        )
        records = RedisTraceStore(redis, settings.session_ttl_s, bounds, keys)
        self.meter = OrchestratorMeter()
        self.tracing = Tracing(Telemetry("orchestrator"), records, self.model_name)
        self._grammars = GrammarChecks(tokenizer)
        self._background = BackgroundTasks(_log, "the cycle log could not be written")
        self._upkeep: asyncio.Task[None] | None = None
        self.fleet = Fleet(
            RedisRegistry(redis, keys).workers,
            tokenizer.vocab_size,
            vocab_sha256=tokenizer.vocab_sha256,
            tls=tls_files(settings),
        )
        self._opener = SessionManager(self.store, tokenizer, self._check_model, self.model_name)
        self._drafting = Drafting(settings, self.fleet.drafts, self.fleet.targets, tokenizer.vocab_size)
        self.corpus = self._drafting.corpus  # past outputs, proposed to later sessions of the same tenant
        self._board = StatusBoard(self.meter, self.admission, self.fleet, redis, keys, self.model_name)
        self.leases = LeaseManager(self.store, self.fleet.release)
        self.sessions = SessionCalls(self.store, tokenizer, self._release, records)
        self.receipts = ReceiptIssuer(
            settings.receipt_keys_file, tokenizer, self.model_name, lambda: self.fleet.identities
        )

    @classmethod
    async def start(cls, settings: OrchestratorSettings) -> Orchestrator:
        """Connect to Redis, load the tokenizer and watch the workers.

        Raises:
            UnavailableError: Redis cannot be reached within `REDIS_WAIT_S`.
            InvalidArgumentError: The model does not exist, a connected worker has another vocabulary, or the
                URL is that of a Redis Cluster.
        """
        await wait_for_redis(settings.redis_login_url, REDIS_WAIT_S)
        redis = connect(settings.redis_login_url)
        try:
            tokenizer = await asyncio.to_thread(Tokenizer, resolve_model(settings.model))
            orchestrator = cls(settings, redis, tokenizer)
            await orchestrator.fleet.start(CONNECT_S)
            await orchestrator._board.start(settings.metrics_listen)
        except BaseException:
            await redis.aclose()
            raise
        orchestrator._fit_context()
        orchestrator.leases.start()
        orchestrator._upkeep = asyncio.create_task(
            repeat(lambda: orchestrator.corpus.forget_missing(orchestrator.store.exist), FORGET_PERIOD_S),
            name="forgetting of deleted sessions",
        )
        return orchestrator

    @property
    def adapters(self) -> list[str]:
        return self.fleet.adapters

    @property
    def num_requests(self) -> int:
        return self.admission.num_running + self.admission.num_waiting

    async def generate(
        self, request: GenerationRequest, caller: Caller = ANONYMOUS
    ) -> AsyncGenerator[Chunk, None]:
        """Stream one completion, one chunk per cycle; closing the iterator cancels it and frees the caches.

        Before the first cycle, whose verification reads the prompt, comes a chunk that `is_opening`.

        Raises:
            NotFoundError: The request names another model.
            InvalidArgumentError: Names the field that is wrong.
            ResourceExhaustedError: Too many requests run and wait, or too much is stored; has a retry delay.
            FailedPreconditionError: A session of this name exists.
            ModelChangedError: The session's target model is not served any more.
            UnavailableError: No target worker or no Redis.
            DeadlineExceededError: A verification took too long.
        """
        async with contextlib.AsyncExitStack() as stack:
            meter = stack.enter_context(self.meter.request(request))
            span = await stack.enter_async_context(self.tracing.request(request, caller))

            async def deliver(chunk: Chunk) -> Chunk:
                if chunk.finish_reason is not None and opened.request.receipt:
                    chunk = replace(chunk, receipt=await self.receipts.issue(opened, chunk))
                if caller.tenant or not request.store:
                    name = name_of(chunk.session_id) if request.store else ""
                    chunk = replace(chunk, session_id=name)
                if not chunk.is_opening:
                    meter.deliver(chunk)
                    span.deliver(chunk)
                return chunk

            await self._check(request)
            await stack.enter_async_context(self.admission.place(caller))
            await self._check_grammar(request.sampling.grammar, caller, span)
            self._fit_context()
            opened = await self._opener.open(request, self.max_context, caller)
            session, former = opened.session, opened.handover
            progress = ChunkBuilder(session, self.tokenizer, opened.offset, former.counters, former.elapsed_s)
            session.deadline = caller.deadline
            if request.store:
                stack.enter_context(self._owning(opened, progress))
            async with contextlib.aclosing(opened.replay(progress)) as missed:
                async for chunk in missed:
                    yield await deliver(chunk)
            if session.finish_reason is not None:
                return
            prediction = await self.tokenizer.ids_of(opened.request.prediction or (), is_start=False)
            if not request.sampling.grammar:  # that of a resumed session is not checked yet
                await self._check_grammar(session.params.grammar, caller, span)
            grammar = await self._begin_grammar(session, caller)
            turn = stack.enter_context(self._turn(opened, progress, span, prediction, grammar))
            await turn.reach()
            yield await deliver(progress.piece((), ""))
            cycles = await stack.enter_async_context(contextlib.aclosing(turn.run_cycles()))
            try:
                async for cycle in cycles:
                    yield await deliver(turn.chunk(cycle))
            except CancelledError as error:
                yield await deliver(turn.cancelled(error))

    async def _check(self, request: GenerationRequest) -> None:
        await check_request(
            request,
            model_name=self.model_name,
            vocab_size=self.vocab_size,
            max_context=self.tokenizer.max_context,
            adapters=self.adapters,
        )
        if request.resume_from is None:
            self._drafting.check(request)
        if request.receipt:
            self.receipts.check()

    async def _check_grammar(self, grammar: str, caller: Caller, span: RequestSpan) -> None:
        """Check a grammar that is not empty, and that target workers have the same library."""
        if not grammar:
            return
        check_grammars(self.fleet.targets, grammar_identity())
        is_known, began = self._grammars.is_remembered(grammar), time.perf_counter()
        await self._grammars.check(grammar, caller)
        if not is_known:
            span.compiled(time.perf_counter() - began)

    async def _begin_grammar(self, session: Session, caller: Caller) -> GrammarState | None:
        if not session.params.grammar:
            return None
        output = session.token_ids[len(session.prompt) :]
        return await self._grammars.begin(session.params.grammar, caller, output)

    @contextlib.contextmanager
    def _owning(self, opened: OpenSession, progress: ChunkBuilder) -> Iterator[None]:
        """Renew the session's lease inside the block; detach the session if its turn has not ended then."""
        try:
            with self.leases.holding(opened.session):
                yield
        finally:
            if opened.ended is None and not progress.has_ended:
                self.leases.detach(opened.session)

    def _turn(
        self,
        opened: OpenSession,
        progress: ChunkBuilder,
        span: RequestSpan,
        prediction: Sequence[int],
        grammar: GrammarState | None,
    ) -> RunningTurn:
        settings, session = self._settings, opened.session
        spec = session_spec(session, self.tokenizer.eos_token_ids, shares_caches=settings.prefix_caching)
        drafter, controller = self._drafting.open(session, opened.request, spec, prediction, grammar)
        verifier = RemoteVerifier(self.fleet.targets, spec, timeout_s=VERIFY_TIMEOUT_S, wait_s=WORKER_WAIT_S)
        is_stored = opened.request.store
        return RunningTurn(
            opened,
            progress,
            drafter,
            controller,
            verifier,
            self.tracing.cycle_log(session, span, self._background, is_stored=is_stored),
            store=self.store if is_stored else self.unstored,
            meter=self.meter,
            drafting=self._drafting,
            corpus=self.corpus,
            fleet=self.fleet,
        )

    @property
    def drafters(self) -> list[DrafterKind]:
        return self._drafting.kinds

    async def status(self) -> list[ProcessStatus]:
        return await self._board.all()

    async def close(self) -> None:
        """Close every connection; requests in flight fail with UnavailableError."""
        if self._upkeep is not None:
            await end_tasks(self._upkeep)
        await self._board.stop()
        await self.fleet.close()
        await self.leases.close()
        await self._grammars.close()
        await self._background.settled()
        await self.responses.close()
        await self.tracing.shutdown()
        await self._redis.aclose()

    async def _check_model(self, session_id: str, identity: str, left_s: float) -> None:
        if identity:
            wait_s = max(0.0, min(left_s, WORKER_WAIT_S))
            await check_served(self.fleet.targets, session_id, identity, wait_s)

    def _release(self, session_id: str, epoch: int, *, forget: bool = False) -> None:
        """Release a session on all workers; with `forget` its outputs are no longer proposed either."""
        if forget:
            self.corpus.forget(session_id)
        self.fleet.release(session_id, epoch, forget=forget)

    def _fit_context(self) -> None:
        """Limit the context to the workers', which may be configured below the model's."""
        self.max_context = min(self.tokenizer.max_context, self.fleet.max_context or 2**31)
