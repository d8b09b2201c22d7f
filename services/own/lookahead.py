"""Drafts ahead: small forwards at idle CPU priority for sessions whose proposals are being verified."""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from services.engine.core.device import raise_if_lost
from services.engine.core.errors import CacheFullError, EndedEarlyError
from services.engine.engine import Engine
from services.own.forward_times import time_forward
from services.scheduling.scheduler import BlockQueue
from services.scheduling.tasks import AheadWork, Prepared, ProposeTask, Reply
from services.speculation.outcomes import AHEAD_ROWS, MAX_LEVELS, SESSION_ROWS, OutcomeSet
from services.speculation.proposals import RUN
from services.speculation.session import Speculation
from services.speculation.tree import Node

MIN_SENT = 0.25
"""Least total probability of proposals to send together, as a message costs as much as a forward; 0 of a slow
draft."""

MANY_ROWS = 64, 16
MAX_SLOWDOWN = 1.5
"""Tokens in a forward, and its duration over one of a single token, where rows cost next to nothing: on a
GPU, which reads its weights once for all of them."""

SLOW_S = 0.01
"""Of a draft's forward: from here on it prepares for the running verification only. The round trip to another
node, for which it would prepare for the next one, too, is short beside the target's forward, and each forward
takes memory bandwidth from a target on the same machine."""

CROWD = 2
"""Sessions per row of a forward beyond which nothing is prepared: it would hardly ever be whole in time."""

_TRIAL_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


@functools.cache
def can_use_idle_priority() -> bool:
    """Whether a thread of this process may take idle priority and restore its usual priority afterwards.

    Restoring needs CAP_SYS_NICE or an RLIMIT_NICE of 20 (see sched(7)): without them a thread would keep
    idle priority permanently. Tried once, in a separate thread.
    """
    if not hasattr(os, "SCHED_IDLE"):
        return False
    succeeded: list[bool] = []

    def attempt() -> None:
        usual = os.sched_getscheduler(0)
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, usual, os.sched_param(0))
        except OSError:
            return
        succeeded.append(True)

    thread = threading.Thread(target=attempt, name="idle-priority-check")
    thread.start()
    thread.join(_TRIAL_TIMEOUT_S)  # an idle-priority thread may never run while all cores are busy
    return bool(succeeded)


def measure_ahead(engine: Engine) -> tuple[int, float, int]:
    """Return the arguments `max_rows`, `rows_cost` and `max_levels` of `Lookahead` for an engine."""
    with suppress(CacheFullError):
        one_s = time_forward(engine, 1)
        run_s = time_forward(engine, RUN, is_run=True) / RUN if engine.can_chain else one_s
        max_levels = MAX_LEVELS if one_s < SLOW_S else 1
        for size in MANY_ROWS:
            if (many_s := time_forward(engine, size)) <= MAX_SLOWDOWN * one_s:
                return size, many_s / run_s, max_levels
        return AHEAD_ROWS, time_forward(engine, AHEAD_ROWS) / run_s, max_levels
    return AHEAD_ROWS, math.inf, MAX_LEVELS


class Lookahead:
    """Prepares the next proposals of sessions, likeliest outcomes over all sessions first.

    Args:
        max_rows: Upper bound of tokens in one forward; 0: nothing is prepared.
        rows_cost: Seconds of such a forward over those per token of a run along one chain.
        max_levels: Verifications whose outcomes are followed, one after another.
        queue: Of the blocks; its `stop` is set while one waits for the engine. It takes the AheadWork.

    Attributes:
        num_beyond: How many tokens after a proposal a parallel draft predicts, too.
    """

    def __init__(
        self,
        engine: Engine,
        max_rows: int,
        rows_cost: float,
        max_levels: int,
        queue: BlockQueue[ProposeTask, Any],
    ) -> None:
        self._engine, self._max_rows, self._rows_cost, self._queue = engine, max_rows, rows_cost, queue
        self._max_levels, self._is_slow = max_levels, max_levels == 1
        self._stop, self._stats = queue.stop, queue.meter.ahead
        self.num_beyond = int(max_rows > 0)
        self._pending: dict[str, tuple[Speculation, ProposeTask]] = {}
        # On shared cores draft-ahead would otherwise delay the event loops that deliver the verdicts.
        self._is_idle = max_rows > 0 and engine.can_chain and can_use_idle_priority()
        self._usual = os.sched_getscheduler(0) if self._is_idle else 0
        self._thread_id: int | None = None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return 0 < len(self._pending) <= CROWD * self._max_rows

    def add(self, speculation: Speculation, task: ProposeTask, *, is_hit: bool) -> None:
        """Count the proposal just made for a task, and start preparing those that may follow it.

        It is a hit if it needed no forward.
        """
        if self._max_rows > 0:
            self._pending[speculation.session.session_id] = speculation, task
            if speculation.is_continued:
                self._stats.lookups += 1
                self._stats.hits += is_hit

    def drop(self, session_id: str, *, is_stopped: bool = True) -> None:
        """Prepare nothing more for a session; `is_stopped`: something may be left."""
        _, task = self._pending.pop(session_id, (None, None))
        if task is not None and task.ahead is not None:
            task.ahead.is_stopped = is_stopped
            self._queue.replies.append((task, Reply(task.request_id, session_id, task.ahead)))

    def preempt(self) -> None:
        """Raise the priority of the current forward, as a request waits and has set `stop`. Thread-safe."""
        if (thread_id := self._thread_id) is not None:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(thread_id, self._usual, os.sched_param(0))

    def step(self) -> list[Prepared]:
        """Feed the open nodes that are likeliest to be needed; return the proposals that this completes."""
        pending = list(self._pending.values())
        chosen, run_length = self._choose()
        if not chosen:
            return self._whole(pending, 0.0)
        self._thread_id = threading.get_native_id() if self._is_idle else None
        began = time.monotonic()
        try:
            count = self._run(chosen, run_length) if run_length > 1 else self._feed(chosen)
            self._note(chosen, began, count)
        except EndedEarlyError:
            pass
        except CacheFullError:
            self._pending.clear()
        except Exception as error:
            raise_if_lost(error)
            _log.exception("drafting ahead over %d sessions failed", len(chosen))
            for speculation in chosen:
                self._engine.release(speculation.session.session_id)
            self._pending.clear()
        finally:
            self._thread_id = None
        return self._whole(pending, 0.0 if self._is_slow else MIN_SENT)

    def _note(self, chosen: Iterable[Speculation], began: float, count: int) -> None:
        """Count forwards, also on the tasks of sampled sessions."""
        self._stats.forwards += count
        for speculation in chosen:
            _, task = self._pending[speculation.session.session_id]
            if task.traceparent:
                task.ahead = work = task.ahead or AheadWork(began)
                work.num_forwards, work.ended = work.num_forwards + count, time.monotonic()

    def _whole(self, pending: list[tuple[Speculation, ProposeTask]], least: float) -> list[Prepared]:
        """Complete proposals not yet returned, if a session's are at least `least` likely together."""
        return [
            Prepared(task, [node.token_id for node in reading.root.path()], reading.proposal())
            for speculation, task in pending
            if speculation.ahead is not None and task.wants_ahead and not task.cancelled
            for reading in speculation.ahead.take_whole(least)
        ]

    def _choose(self) -> tuple[dict[Speculation, list[Node]], int]:
        """Return the nodes to feed, and how many forwards to run in one call along one node's chain."""
        candidates: list[tuple[float, Speculation, Node, int]] = []
        for session_id, (speculation, _) in list(self._pending.items()):
            wanted = self._wanted(speculation)
            if wanted:
                candidates += [(weight, speculation, node, length) for weight, node, length in wanted]
            else:
                self.drop(session_id, is_stopped=False)
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        if candidates and len(self._pending) == 1:
            weight, speculation, node, length = candidates[0]
            others = sum(candidate[0] for candidate in candidates[1 : self._max_rows])
            if length > 1 and weight + others < weight * self._rows_cost and speculation.can_run([node]):
                return {speculation: [node]}, length
        chosen: dict[Speculation, list[Node]] = {}
        num_rows = 0
        for _, speculation, node, _ in candidates:
            if len(chosen.get(speculation, ())) >= (1 if speculation.is_parallel else SESSION_ROWS):
                continue  # of a parallel draft one block after another
            num_rows += len(speculation.feed([node]).token_ids) if speculation.is_parallel else 1
            if chosen and num_rows > self._max_rows:
                break
            chosen.setdefault(speculation, []).append(node)
        return chosen, 1

    def _wanted(self, speculation: Speculation) -> list[tuple[float, Node, int]]:
        """A session's nodes to feed; none if its cache was evicted or feeding would evict other sessions."""
        engine, tree, session_id = self._engine, speculation.tree, speculation.session.session_id
        num_slots = tree.chain_length + len(tree.off_chain) + max(self._max_rows, RUN)
        if speculation.is_parallel and speculation.sent is not None:
            num_slots += 2 * speculation.sent.shape.depth
        if not (speculation.has_noise and speculation.is_held and engine.has_room(session_id, num_slots)):
            return []
        if speculation.ahead is None:
            assert speculation.sent is not None
            # What a tree or a parallel draft proposes depends on what was accepted meanwhile, and on masks.
            is_chain = not (speculation.is_parallel or speculation.sent.shape.is_tree)
            max_levels = self._max_levels if is_chain else 1
            speculation.ahead = OutcomeSet(
                speculation.sent, speculation.read_outcome, self._max_rows, max_levels
            )
        return speculation.ahead.wanted()

    def _run(self, chosen: dict[Speculation, list[Node]], length: int) -> int:
        """Feed up to `length` tokens from the node on, one per forward; return their number."""
        ((speculation, (node,)),) = chosen.items()
        length = min(length, self._engine.max_context - node.position)
        feed = speculation.feed([node])
        token_ids, logits = speculation.run(feed, length, stop=self._stop, is_idle=self._is_idle)
        speculation.open_run(node, token_ids, logits)
        return len(token_ids)

    def _feed(self, chosen: dict[Speculation, list[Node]]) -> int:
        """Feed the nodes in one forward; return the number of forwards."""
        feeds = [speculation.feed(nodes) for speculation, nodes in chosen.items()]
        idle_until = self._stop if self._is_idle else None
        # The block that comes is nearly always this session's, and rarely needs what is computed now.
        until = self._stop if self._is_slow and len(self._pending) == 1 else None
        results = self._engine.step(feeds, idle_until, until)
        for (speculation, nodes), logits in zip(chosen.items(), results, strict=True):
            speculation.open(nodes, logits)
        return 1
