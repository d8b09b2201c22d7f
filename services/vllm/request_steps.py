"""What schedulers with vLLM share: blocks that are requests of vLLM, and its steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gammaray.errors import GammarayError, InternalError, ResourceExhaustedError
from services.engine.core.device import raise_if_lost
from services.engine.core.errors import EngineLostError
from services.scheduling.scheduler import BlockQueue, TaskT, Work
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec, Timing
from services.vllm.engine import StepResult, VllmEngine
from services.vllm.messages import BeginMasks

_log = logging.getLogger(__name__)

MAX_STEP_S = 300.0
"""After which a step counts as stuck, such as one whose ranks wait for each other; vLLM has the same limit.
A step takes seconds at most, since compilation is over when the worker serves."""


@dataclass(slots=True, eq=False)
class RequestWork(Work[TaskT], Generic[TaskT]):
    request_id: str

    @property
    def num_rows(self) -> int:
        """Rows of logits that decide its next tokens."""
        return 1


RequestWorkT = TypeVar("RequestWorkT", bound=RequestWork[Any])


class RequestSteps(Generic[RequestWorkT]):
    """Runs vLLM's steps for the blocks of a scheduler's queue.

    Attributes:
        works: The blocks that have a request, by its id.
    """

    def __init__(
        self,
        engine: VllmEngine,
        queue: BlockQueue[Any, RequestWorkT],
        fail_all: Callable[[GammarayError], None],
    ) -> None:
        self._engine, self._queue, self._fail_all = engine, queue, fail_all
        self.works: dict[str, RequestWorkT] = {}

    def run(self, begin_masks: BeginMasks) -> StepResult | None:
        """Run a step, see `try_step`, and count what it costs."""
        began = time.perf_counter()
        result = self.try_step(begin_masks)
        if result is not None:
            self._count(result, int((time.perf_counter() - began) * 1e6))
        return result

    def try_step(self, begin_masks: BeginMasks) -> StepResult | None:
        """Run a step; None when it failed and a later one can succeed: then all blocks are answered.

        `begin_masks` begins to compute the masks of the posted blocks that have a grammar.
        """
        for work in self._queue.running.values():
            self._queue.note_start(work)
        try:
            return self._engine.step(begin_masks)
        except EngineLostError:
            raise
        except Exception as error:
            raise_if_lost(error)
            _log.exception("a step over %d sessions failed", len(self._queue.running))
            self._fail_all(InternalError(f"the forward failed: {type(error).__name__}: {error}"))
            return None

    def _count(self, result: StepResult, took_us: int) -> None:
        """Add a step's time, and what it found in the prefix cache, to its blocks and to the metrics."""
        self._queue.meter.step(took_us * 1e-6, len(result.scheduled))
        cost = Timing(0, took_us, took_us, len(result.scheduled), result.num_tokens, 1)
        cost.batch_rows = sum(self.works[name].num_rows for name in result.verdicts if name in self.works)
        for request_id in result.scheduled:
            if request_id in self.works:
                self.works[request_id].timing.add(cost)
        for request_id, num_cached in result.num_cached.items():
            work = self.works.get(request_id)
            if work is not None and work.task.spec is not None:
                work.timing.cached_tokens = num_cached
                self._queue.meter.looked_up(len(work.session.tokens), num_cached)

    def num_ahead(self, request_id: str, spec: SessionSpec, session: SessionCopy) -> int:
        """Return how many tokens a request has after a session's; -1 if its text or spec is another one."""
        tokens, count = self._engine.tokens(request_id), len(session.tokens)
        if tokens is None or spec != session.spec or len(tokens) < count:
            return -1
        first = min(session.changed_from, count)
        return len(tokens) - count if tokens[first:count] == session.tokens[first:] else -1

    def answer(self, work: RequestWorkT, outcome: object) -> None:
        """End the work on a block; its request stays open."""
        del self.works[work.request_id]
        self._queue.answer(work, outcome)

    def forget(self, session: SessionCopy) -> None:
        """Release what vLLM holds of a session without requests; with a cache salt its cache is retained."""
        self._engine.end_session(session.session_id)
        if session.spec.cache_salt is None:
            self._engine.forget(session.tokens, session.spec, salt_of(session))

    def forget_prefix(self, session_id: str) -> None:
        """Drop what the prefix cache has of a session."""
        session = self._queue.sessions.find(session_id)
        if session is not None:
            self._engine.forget(session.tokens, session.spec, salt_of(session))

    def too_small(self) -> ResourceExhaustedError:
        """Return the error of a block that does not fit into an empty cache."""
        budget = self._engine.stats().cache_budget_bytes
        return ResourceExhaustedError(f"the KV cache budget is too small: {budget} bytes")


def salt_of(session: SessionCopy) -> str:
    """Return what sessions that share the prefix cache have in common; without a salt it is their own."""
    salt = session.spec.cache_salt
    return f"session {session.session_id}" if salt is None else f"tenant {salt}"
