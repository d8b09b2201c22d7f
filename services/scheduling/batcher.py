"""Continuous batching of blocks on our own engine.

Verification feeds a whole proposal in one forward, drafting one token per forward, both after the committed
tokens that are not cached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Generic

from torch import Tensor

from gammaray.errors import GammarayError, InternalError, ResourceExhaustedError
from services.engine.core.batch import SequenceInput
from services.engine.core.device import raise_if_lost, wait_for_device
from services.engine.core.errors import CacheFullError, EngineLostError
from services.engine.core.prefix_cache import MIN_PREFIX
from services.engine.engine import Engine
from services.scheduling.masks import wait_for_any
from services.scheduling.planning import Limits, Running, RunningT, StepBudget, plan
from services.scheduling.scheduler import BlockQueue, Start, TaskT
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import Timing

MAX_SCORED_BYTES = 128 * 2**20
"""Bytes of the logits of committed tokens that one forward may return, for log-probabilities of prompts."""

_log = logging.getLogger(__name__)

Feeds = list[tuple[RunningT, SequenceInput]]
"""The blocks of a forward, each with the tokens that are fed."""

Forward = Callable[[Feeds[RunningT]], list[Tensor]]
"""Returns the logits of each feed; where it runs several forwards, it sets `Batcher.num_forwards` and writes
its feeds to the list."""

Advance = Callable[[RunningT, Tensor], object | None]
"""Takes the logits `[num_logits, vocab_size]` of a feed; returns the outcome, or None for another forward."""


class Batcher(Generic[TaskT, RunningT]):
    """Computes the blocks of a scheduler's queue, those of many sessions with one forward.

    Attributes:
        budget: How many tokens a step may take.
        num_forwards: Forwards of the last step; more than one if several ran in one call.
    """

    def __init__(self, engine: Engine, limits: Limits, queue: BlockQueue[TaskT, RunningT]) -> None:
        scored_rows = max(1, MAX_SCORED_BYTES // (4 * engine.vocab_size))
        self._engine, self._limits = engine, replace(limits, max_scored_rows=scored_rows)
        self._queue = queue
        self.budget = StepBudget(self._limits)
        self.num_forwards = 1

    def admit(self, start: Start[TaskT]) -> None:
        """Admit blocks, see `BlockQueue.admit`."""

        def begin(task: TaskT, session: SessionCopy) -> object:
            self._engine.share(task.session_id, session.spec.cache_salt)
            outcome = start(task, session)
            if task.spec is not None and isinstance(outcome, Running):
                outcome.timing.cached_tokens = self._engine.length(task.session_id)
                self._queue.meter.looked_up(len(session.tokens), outcome.timing.cached_tokens)
            return outcome

        self._queue.admit(begin)

    def match(self, session: SessionCopy, tokens: Sequence[int], changed_from: int) -> None:
        """Drop cached entries that are not the tokens; fork a shared prefix when none is left.

        `tokens` are the model's of a session, which are as cached before `changed_from`.
        """
        cached = self._engine.tokens(session.session_id)
        num_cached = len(cached)
        same, end = min(changed_from, num_cached), min(num_cached, len(tokens))
        while same < end and cached[same] == tokens[same]:
            same += 1
        if same < num_cached:
            self._engine.truncate(session.session_id, same)
        salt = session.spec.cache_salt
        if same == 0 and salt is not None and len(tokens) > MIN_PREFIX:
            source, shared = self._engine.longest_prefix(tokens[:-1], salt)
            if shared >= MIN_PREFIX:
                # With those in work they may not fit: then the prefix is computed again, in chunks. Without
                # `keep` a block of several chunks would lose its cache to each new block, and starve.
                with suppress(CacheFullError):
                    keep = frozenset(self._queue.running)
                    self._engine.fork(source, session.session_id, shared, keep)

    def forget(self, session: SessionCopy) -> None:
        """Release a session's cache; with a cache salt it is retained for sessions with the same prefix."""
        if (salt := session.spec.cache_salt) is not None:
            self._engine.retain(session.session_id, salt)
        else:
            self._engine.release(session.session_id)

    def run(self, forward: Forward[RunningT], advance: Advance[RunningT]) -> None:
        """Serve the blocks that are ready with one forward; wait a moment for masks if there is none."""
        queue = self._queue
        ready = [running for running in queue.running.values() if running.is_ready]
        # Alone, a session's steps delay no other one.
        budget = self.budget if len(queue.sessions) > 1 else None
        batch = plan(ready, self._engine.length, self._limits, budget)
        if batch:
            self._serve(batch, forward, advance)
        elif not queue.replies:
            wait_for_any(queue)

    def _serve(self, batch: Feeds[RunningT], forward: Forward[RunningT], advance: Advance[RunningT]) -> None:
        began = time.perf_counter()
        for running, _ in batch:
            self._queue.note_start(running)
        try:
            self.num_forwards = 1
            results = forward(batch)
            wait_for_device(self._engine.device)  # else only the launch would be timed
        except EngineLostError:
            raise
        except CacheFullError as error:
            if len(batch) > 1:
                # The batch does not fit: run the oldest block alone, which evicts others; they run later.
                self._serve(batch[:1], forward, advance)
            else:
                self._fail(batch, ResourceExhaustedError(f"the KV cache budget is too small: {error}"))
            return
        except Exception as error:
            raise_if_lost(error)
            _log.exception("a forward over %d sessions failed", len(batch))
            self._fail(batch, InternalError(f"the forward failed: {type(error).__name__}: {error}"))
            return
        forward_us = _elapsed_us(began)
        done = []
        for (running, feed), logits in zip(batch, results, strict=True):
            outcome = self._try_advance(running, logits, advance) if feed.num_logits else None
            if outcome is not None:
                done.append((running, outcome))
        num_tokens, num_forwards = sum(len(feed.token_ids) for _, feed in batch), self.num_forwards
        cost = Timing(0, _elapsed_us(began), forward_us, len(batch), num_tokens, num_forwards)
        cost.batch_rows = sum(feed.num_logits for _, feed in batch)
        self.budget.observe(num_tokens // num_forwards, cost.compute_us * 1e-6 / num_forwards)
        for _ in range(num_forwards):
            self._queue.meter.step(cost.compute_us * 1e-6 / num_forwards, len(batch))
        for running, _ in batch:
            running.timing.add(cost)
        for running, outcome in done:
            self._queue.answer(running, outcome)

    def _try_advance(self, running: RunningT, logits: Tensor, advance: Advance[RunningT]) -> object | None:
        try:
            return advance(running, logits)
        except EngineLostError:
            raise
        except GammarayError as error:
            return error
        except Exception as error:
            raise_if_lost(error)
            _log.exception("session %s failed", running.task.session_id)
            self._engine.release(running.task.session_id)
            return InternalError(f"{type(error).__name__}: {error}")

    def _fail(self, batch: Feeds[RunningT], error: GammarayError) -> None:
        for running, _ in batch:
            self._engine.release(running.task.session_id)
            self._queue.answer(running, error)


def _elapsed_us(since: float) -> int:
    return int((time.perf_counter() - since) * 1e6)
