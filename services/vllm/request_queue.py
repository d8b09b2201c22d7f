"""What target and draft workers with vLLM share: blocks that are requests of vLLM, and its steps."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gammaray.errors import GammarayError, InternalError, ResourceExhaustedError
from services.engine.core.device import raise_if_lost
from services.engine.core.errors import EngineLostError
from services.engine.core.kv_cache import CacheStats
from services.scheduling.block_queue import BlockQueue, TaskT, Work
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import NeedTokens, Timing
from services.vllm.engine import StepResult, VllmEngine
from services.vllm.messages import Masks

_log = logging.getLogger(__name__)

MAX_STEP_S = 300.0
"""After which a step counts as stuck, such as one whose ranks wait for each other; vLLM has the same limit.
A step takes seconds at most, since compilation is over when the worker serves."""


@dataclass(slots=True, eq=False)
class RequestWork(Work[TaskT], Generic[TaskT]):
    """A block that vLLM computes."""

    request_id: str


RequestWorkT = TypeVar("RequestWorkT", bound=RequestWork[Any])


class RequestQueue(BlockQueue[TaskT, RequestWorkT]):
    """Runs vLLM's steps for admitted blocks."""

    step_timeout_s = MAX_STEP_S

    def __init__(self, engine: VllmEngine, limits: Limits, grammars: Grammars | None) -> None:
        self.engine, self.limits = engine, limits
        self._by_request: dict[str, RequestWorkT] = {}
        # The sampler draws the noise, on the device.
        super().__init__(engine.vocab_size, "cpu", grammars)

    @abstractmethod
    def _start(self, task: TaskT, session: SessionCopy) -> RequestWorkT | object:
        """Return the work of an admitted task, or its outcome if no step is needed."""

    @abstractmethod
    def _take(self, result: StepResult, took_us: int) -> None:
        """Add a step's time to its blocks, and answer those that it completed."""

    @abstractmethod
    def _begin_masks(self, posted: dict[str, Any]) -> Callable[[], Masks] | None:
        """Begin to compute the masks of the posted blocks with a grammar; return what waits for them."""

    @abstractmethod
    def _close_requests(self, session_id: str) -> None:
        """End the requests of a session without a block."""

    def check(self) -> None:
        self.engine.check()

    def stats(self) -> CacheStats:
        return self.engine.stats()

    def _check_task(self, task: TaskT) -> None:
        """Raise InvalidArgumentError for a task that cannot be served."""

    def _try_start(self, task: TaskT) -> RequestWorkT | object:
        try:
            self._check_task(task)
            session = self.sessions.admit(task)
            return session if isinstance(session, NeedTokens) else self._start(task, session)
        except EngineLostError:
            raise
        except GammarayError as error:
            return error

    def _forget(self, session: SessionCopy) -> None:
        self._close_requests(session.session_id)
        self.engine.end_session(session.session_id)
        if session.spec.cache_salt is None:
            self.engine.forget(session.tokens, session.spec, salt_of(session))

    def _forget_prefix(self, session_id: str) -> None:
        session = self.sessions.find(session_id)
        if session is not None:
            self.engine.forget(session.tokens, session.spec, salt_of(session))

    def _too_small(self) -> ResourceExhaustedError:
        budget = self.engine.stats().cache_budget_bytes
        return ResourceExhaustedError(f"the KV cache budget is too small: {budget} bytes")

    def _step_engine(self) -> StepResult | None:
        """Run a step; None when it failed and a later one can succeed: then all blocks are answered."""
        for work in self._running.values():
            self._note_start(work)
        try:
            return self.engine.step(self._begin_masks)
        except EngineLostError:
            raise
        except Exception as error:
            raise_if_lost(error)
            _log.exception("a step over %d sessions failed", len(self._running))
            self.fail_all(InternalError(f"the forward failed: {type(error).__name__}: {error}"))
            return None

    def _run(self) -> StepResult | None:
        began = time.perf_counter()
        result = self._step_engine()
        if result is not None:
            self._take(result, int((time.perf_counter() - began) * 1e6))
        return result

    def _count(self, result: StepResult, took_us: int, num_rows: int) -> None:
        """Add a step's time, and what it found in the prefix cache, to its blocks and to the metrics."""
        self.meter.step(took_us * 1e-6, len(result.scheduled))
        cost = Timing(0, took_us, took_us, len(result.scheduled), result.num_tokens, 1)
        cost.batch_rows = num_rows
        for request_id in result.scheduled:
            if request_id in self._by_request:
                self._by_request[request_id].timing.add(cost)
        for request_id, num_cached in result.num_cached.items():
            work = self._by_request.get(request_id)
            if work is not None and work.task.spec is not None:
                work.timing.cached_tokens = num_cached
                self.meter.looked_up(len(work.session.tokens), num_cached)


def salt_of(session: SessionCopy) -> str:
    """Return what sessions that share the prefix cache have in common; without a salt it is their own."""
    salt = session.spec.cache_salt
    return f"session {session.session_id}" if salt is None else f"tenant {salt}"
