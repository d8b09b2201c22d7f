"""Continuous batching of blocks, in the engine's thread.

Both workers share this scheduler: verification feeds a whole proposal in one forward, drafting feeds one
token per forward, both after the committed tokens that are not cached.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic

from torch import Tensor

from gammaray.errors import GammarayError, InternalError, ResourceExhaustedError
from services.engine.core.batch import SequenceInput
from services.engine.core.device import raise_if_lost, wait_for_device
from services.engine.core.errors import CacheFullError, EngineLostError
from services.engine.core.kv_cache import CacheStats
from services.engine.core.prefix_cache import MIN_PREFIX
from services.engine.engine import Engine
from services.scheduling.block_queue import BlockQueue, TaskT
from services.scheduling.grammars import Grammars
from services.scheduling.masks import wait_for_any
from services.scheduling.planning import Limits, Running, RunningT, StepBudget, plan
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import NeedTokens, Reply, Timing

MAX_SCORED_BYTES = 128 * 2**20
"""Bytes of the logits of committed tokens that one forward may return, for log-probabilities of prompts."""

_log = logging.getLogger(__name__)


class Scheduler(BlockQueue[TaskT, RunningT], Generic[TaskT, RunningT]):
    """Serves blocks of many sessions with one engine; at most one block per session at a time.

    Args:
        vocab_size: Number of token ids of the sessions; None: that of the engine's model.

    Attributes:
        budget: How many tokens a step may take.
        num_forwards: Forwards of the last step; more than one if a worker ran several in one call.
    """

    def __init__(
        self, engine: Engine, limits: Limits, vocab_size: int | None = None, grammars: Grammars | None = None
    ) -> None:
        scored_rows = max(1, MAX_SCORED_BYTES // (4 * engine.vocab_size))
        self.engine, self.limits = engine, replace(limits, max_scored_rows=scored_rows)
        self.budget = StepBudget(self.limits)
        self.num_forwards = 1
        super().__init__(vocab_size or engine.vocab_size, str(engine.device), grammars)

    @abstractmethod
    def _start(self, task: TaskT, session: SessionCopy) -> RunningT | object:
        """Return the work of an admitted task, or its outcome if no forward is needed."""

    @abstractmethod
    def _advance(self, running: RunningT, logits: Tensor) -> object | None:
        """Take the logits `[num_logits, vocab_size]` of a feed; None requests another forward."""

    def stats(self) -> CacheStats:
        return self.engine.stats()

    def fail_all(self, error: GammarayError) -> None:
        """Answer every block with `error` and drop every session, including the caches of ended sessions."""
        super().fail_all(error)
        self.engine.drop_retained()

    def step(self) -> list[tuple[TaskT, Reply]]:
        self._drop_dead()
        self._admit()
        self._prepare_blocks()
        ready = [running for running in self._running.values() if running.is_ready]
        # Alone, a session's steps delay no other one.
        budget = self.budget if len(self.sessions) > 1 else None
        batch = plan(ready, self.engine.length, self.limits, budget)
        if batch:
            self._forward(batch)
        elif not self._replies:
            wait_for_any(map(self.sessions.find, (*self._running, *self._waiting)))
        replies, self._replies = self._replies, []
        return replies

    def _prepare_blocks(self) -> None:
        """Prepare admitted blocks before their first forward; a worker may draft for several at once."""

    def _forget(self, session: SessionCopy) -> None:
        """Release a session's cache; with a cache salt it is retained for sessions with the same prefix."""
        if (salt := session.spec.cache_salt) is not None:
            self.engine.retain(session.session_id, salt)
        else:
            self.engine.release(session.session_id)

    def _forget_prefix(self, session_id: str) -> None:
        self.engine.forget(session_id)

    def _try_start(self, task: TaskT) -> RunningT | object:
        try:
            session = self.sessions.admit(task)
            if isinstance(session, NeedTokens):
                return session
            self.engine.share(task.session_id, session.spec.cache_salt)
            if task.reads_anew:
                self.engine.truncate(task.session_id, 0)
            else:
                self._match_cache(session)
            outcome = self._start(task, session)
            if task.spec is not None and isinstance(outcome, Running):
                outcome.timing.cached_tokens = self.engine.length(task.session_id)
                self.meter.looked_up(len(session.tokens), outcome.timing.cached_tokens)
            return outcome
        except EngineLostError:
            raise
        except GammarayError as error:
            return error

    def _match_cache(self, session: SessionCopy) -> None:
        """Drop cached entries that are not the committed tokens; fork a shared prefix when none is left."""
        self._match_tokens(session, session.tokens, session.changed_from)

    def _match_tokens(self, session: SessionCopy, tokens: Sequence[int], changed_from: int) -> None:
        """Do so for the model's tokens of a session, which are as cached before `changed_from`."""
        cached = self.engine.tokens(session.session_id)
        num_cached = len(cached)
        same, end = min(changed_from, num_cached), min(num_cached, len(tokens))
        while same < end and cached[same] == tokens[same]:
            same += 1
        if same < num_cached:
            self.engine.truncate(session.session_id, same)
        salt = session.spec.cache_salt
        if same == 0 and salt is not None and len(tokens) > MIN_PREFIX:
            source, shared = self.engine.longest_prefix(tokens[:-1], salt)
            if shared >= MIN_PREFIX:
                # With those in work they may not fit: then the prefix is computed again, in chunks. Without
                # `keep` a block of several chunks would lose its cache to each new block, and starve.
                with suppress(CacheFullError):
                    self.engine.fork(source, session.session_id, shared, frozenset(self._running))

    def _forward(self, batch: list[tuple[RunningT, SequenceInput]]) -> None:
        began = time.perf_counter()
        for running, _ in batch:
            self._note_start(running)
        results = self._run_engine(batch)
        if results is None:
            return
        forward_us = _elapsed_us(began)
        done = []
        for (running, feed), logits in zip(batch, results, strict=True):
            outcome = self._try_advance(running, logits) if feed.num_logits else None
            if outcome is not None:
                done.append((running, outcome))
        num_tokens, num_forwards = sum(len(feed.token_ids) for _, feed in batch), self.num_forwards
        cost = Timing(0, _elapsed_us(began), forward_us, len(batch), num_tokens, num_forwards)
        cost.batch_rows = sum(feed.num_logits for _, feed in batch)
        self.budget.observe(num_tokens // num_forwards, cost.compute_us * 1e-6 / num_forwards)
        for _ in range(num_forwards):
            self.meter.step(cost.compute_us * 1e-6 / num_forwards, len(batch))
        for running, _ in batch:
            running.timing.add(cost)
        for running, outcome in done:
            del self._running[running.task.session_id]
            self._reply(running.task, outcome, running.timing)

    def _run_engine(self, batch: list[tuple[RunningT, SequenceInput]]) -> list[Tensor] | None:
        """Run the forward; None when it failed, in which case the affected blocks were answered."""
        try:
            results = self._step(batch)
            wait_for_device(self.engine.device)  # else only the launch would be timed
            return results
        except EngineLostError:
            raise
        except CacheFullError as error:
            if len(batch) > 1:
                # The batch does not fit: run the oldest block alone, which evicts others; they run later.
                self._forward(batch[:1])
            else:
                self._fail(batch, ResourceExhaustedError(f"the KV cache budget is too small: {error}"))
        except Exception as error:
            raise_if_lost(error)
            _log.exception("a forward over %d sessions failed", len(batch))
            self._fail(batch, InternalError(f"the forward failed: {type(error).__name__}: {error}"))
        return None

    def _step(self, batch: list[tuple[RunningT, SequenceInput]]) -> list[Tensor]:
        """Run the forward; a worker that runs several sets `num_forwards` and writes its feeds to `batch`."""
        self.num_forwards = 1
        return self.engine.step([feed for _, feed in batch])

    def _try_advance(self, running: RunningT, logits: Tensor) -> object | None:
        try:
            return self._advance(running, logits)
        except EngineLostError:
            raise
        except GammarayError as error:
            return error
        except Exception as error:
            raise_if_lost(error)
            _log.exception("session %s failed", running.task.session_id)
            self.engine.release(running.task.session_id)
            return InternalError(f"{type(error).__name__}: {error}")

    def _fail(self, batch: list[tuple[RunningT, SequenceInput]], error: GammarayError) -> None:
        for running, _ in batch:
            del self._running[running.task.session_id]
            self.engine.release(running.task.session_id)
            self._reply(running.task, error, running.timing)


def _elapsed_us(since: float) -> int:
    return int((time.perf_counter() - since) * 1e6)
