"""A worker: an engine in its own thread, a gRPC server in the event loop, and a registry entry."""

from __future__ import annotations

import asyncio
import gc
import logging
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from transformers.utils.logging import disable_progress_bar

from gammaray.checks import is_wildcard, join_address, split_address
from gammaray.config import WorkerSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import UnavailableError
from gammaray.security.tls import tls_files
from gammaray.telemetry.otel import Telemetry
from gammaray.telemetry.prometheus import MetricsExport
from services.process.registry import Announcer
from services.process.server import DRAIN_TIMEOUT_S, GrpcServer, check_serving
from services.scheduling.load import LoadReport, LoadReporter
from services.scheduling.planning import Limits
from services.scheduling.scheduler import Scheduler
from services.streaming.engine_thread import EngineThread
from services.streaming.messages import Model
from services.streaming.streams import Streams

_CLOSE_GRACE_S = 0.5  # for streams without pending blocks to end after the drain
_STEP_TIMEOUT_S = 30.0
MAX_STEP_S = 0.05
"""Seconds that a step of more than 32 tokens may take while several sessions are served: a block that arrives
waits for it, about as long as a cycle takes."""
_LOAD_TIMEOUT_S = 5.0
_WATCH_PERIOD_S = 1.0

_log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


class Worker(ABC, Generic[SettingsT]):
    """Base of draft and target workers; `start` and `stop` are called from one event loop.

    Orchestrators connect to `host` if the server listens on every interface. Before the start `address` is
    empty and `streams` None. `ended` is set when the worker stopped because its engine was lost.
    """

    role: ClassVar[str]
    service_name: ClassVar[str]

    def __init__(self, settings: SettingsT, host: str = "") -> None:
        self.settings, self._host = settings, host
        self.address = ""
        self.engine = EngineThread(self._load, name=f"{self.role}-engine")
        self.streams: Streams | None = None
        self._server: GrpcServer | None = None
        self._announcer: Announcer | None = None
        self._model: Model | None = None
        self._metrics: MetricsExport | None = None
        self._telemetry: Telemetry | None = None
        self._load_reporter = LoadReporter()
        self._watcher: asyncio.Task[None] | None = None
        self._is_lost = False
        self.ended = asyncio.Event()

    @property
    def _limits(self) -> Limits:
        settings = self.settings
        return Limits(settings.max_batch_tokens, settings.prefill_chunk, max_step_s=MAX_STEP_S)

    @abstractmethod
    def load_model(self, path: str) -> tuple[Model, Scheduler[Any]]:
        """Load what this kind of worker serves, in the engine's thread; return its facts and scheduler."""

    @abstractmethod
    def _add_servicer(self, server: Any, streams: Streams, model: Model) -> None:
        """Register the service of this kind of worker."""

    async def start(self) -> str:
        """Load the model, serve, announce; returns the server's address."""
        settings = self.settings
        check_serving(settings, self._host)
        await self.engine.start()
        assert self._model is not None
        assert self.engine.scheduler is not None
        self._telemetry = Telemetry(self.role)
        # Loaded objects live as long as the process: exclude them from garbage collection during cycles.
        gc.collect()
        gc.freeze()
        self._metrics = MetricsExport(
            self.engine.scheduler.queue.meter.meter,
            role=self.role,
            model=settings.model,
            listen=settings.metrics_listen,
            kernel=self._model.kernel,
        )
        self._model = replace(self._model, metrics_address=self._metrics.address)
        self.streams = Streams(self.engine, self._telemetry.tracer)
        self._server = GrpcServer([self.service_name], tls_files(settings))
        self._add_servicer(self._server.server, self.streams, self._model)
        self.address = await self._server.start(settings.listen)
        if settings.redis_url:
            url, prefix = settings.redis_login_url, settings.redis_prefix
            self._announcer = Announcer(url, self.role, self._advertised(), prefix)
            await self._announcer.start()
        self._watcher = asyncio.create_task(self._watch(), name=f"{self.role} watcher")
        return self.address

    @property
    def kernel(self) -> str:
        """Implementation of the model's forwards, see `Engine.kernel`; empty before the start."""
        return self._model.kernel if self._model is not None else ""

    def check(self) -> None:
        """Raise UnavailableError when the engine's thread has ended, or is stuck."""
        if not self.engine.is_alive or self._is_lost:
            raise UnavailableError(f"the {self.role} worker's engine has stopped")

    async def load(self) -> LoadReport:
        """Return the load since the last call; TimeoutError if a step takes too long."""
        counters = await asyncio.wait_for(self.engine.call(lambda s: s.queue.load()), _LOAD_TIMEOUT_S)
        return self._load_reporter.report(counters)

    async def stop(self) -> bool:
        """Leave the registry, refuse new blocks, finish the running ones; return whether all did in time."""
        is_clean = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._server is not None:
            await self._server.set_serving(False)
        if self._announcer is not None:
            await self._announcer.withdraw()
        if self.streams is not None:
            is_clean = await self.streams.drain(DRAIN_TIMEOUT_S)
        if self._server is not None:
            await self._server.server.stop(_CLOSE_GRACE_S)
        if self.engine.is_alive and not self._is_lost:
            is_clean = await self.engine.stop(_STEP_TIMEOUT_S) and is_clean
        if self._metrics is not None:
            await self._metrics.stop()
        if self._telemetry is not None:
            await self._telemetry.shutdown()
        return is_clean

    async def _watch(self) -> None:
        """Stop serving when the engine is lost, so that orchestrators switch to other workers at once."""
        reason = ""
        while not self.engine.ended.is_set() and not reason:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.engine.ended.wait(), _WATCH_PERIOD_S)
            self.engine.check()
            reason = self.engine.why_stuck()
        self._is_lost = True
        if reason:
            _log.error("%s, and its thread is stuck; this worker ends", reason)
        assert self._server is not None
        await self._server.set_serving(False)
        if self._announcer is not None:
            await self._announcer.withdraw()
        await self._server.server.stop(0)
        self.ended.set()

    def _load(self) -> Scheduler[Any]:
        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types here
        self._model, scheduler = self.load_model(resolve_model(self.settings.model, self.role))
        return scheduler

    def _advertised(self) -> str:
        host, port = split_address("listen", self.address)
        return join_address(self._host, port) if is_wildcard(host) else self.address
