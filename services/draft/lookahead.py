"""Drafts ahead: small forwards for the sessions that wait for their verdicts, at idle CPU priority.

A throttle stops it where it costs more than it saves."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from contextlib import suppress
from ctypes import c_int32

from services.draft.outcomes import OutcomeSet
from services.draft.proposals import RUN
from services.draft.session import Speculation
from services.draft.tree import Node
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine
from services.scheduling.metrics import AheadStats
from services.scheduling.tasks import Prepared, ProposeTask

__all__ = [
    "IdlePriority",
    "Lookahead",
    "Throttle",
    "can_give_way",
]

_TRIAL_TIMEOUT_S = 5.0


@functools.cache
def can_give_way() -> bool:
    """Whether a thread of this process may take idle priority, and its usual one again after it.

    The way back needs CAP_SYS_NICE or an RLIMIT_NICE of 20 (see sched(7)): without them a thread would keep
    idle priority for good. Tried once, in a thread of its own.
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
    thread.join(_TRIAL_TIMEOUT_S)  # on cores that are all taken it may never get a turn: then it is of no use
    return bool(succeeded)


class IdlePriority:
    """Runs the thread that enters it at idle priority: whoever else is ready on its core goes first.

    On shared cores draft-ahead would else take time from the event loops that carry the verdict it waits for.
    Only where `can_give_way`, and for short work: a thread that waits for a core with Python's lock in hand
    keeps the others waiting.
    """

    def __init__(self) -> None:
        self._usual = self._thread_id = 0
        self._is_idle = False

    def __enter__(self) -> None:
        """Take idle priority.

        Raises:
            OSError: The system does not allow it.
        """
        self._usual, self._thread_id = os.sched_getscheduler(0), threading.get_native_id()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        self._is_idle = True

    def __exit__(self, *_: object) -> None:
        """Take the usual priority again."""
        self._is_idle = False
        os.sched_setscheduler(0, self._usual, os.sched_param(0))

    def preempt(self) -> None:
        """Give the thread its usual priority now, from another one: somebody waits for it."""
        if self._is_idle:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setscheduler(self._thread_id, self._usual, os.sched_param(0))


DECAY, SLOW_DECAY = 0.95, 0.99
"""Per lookup. Time saved and spent count for some twenty of them, hits foreseen and come for a hundred."""

PRIOR_HITS = 3.0
"""Hits foreseen that came, as the prior of how good the draft's foresight is."""

MIN_LOOKUPS = 10
"""Before so many lookups nothing is concluded."""

PAUSE = 64
"""Lookups to sit out after it did not pay, before it is tried again."""

MIN_OUTCOME = 0.08
"""Outcomes less likely than this are not prepared for: one more row costs about half a forward on a CPU."""


class Throttle:
    """Decayed sums of what draft-ahead saved and cost, over all sessions of a worker."""

    def __init__(self) -> None:
        self.stats = AheadStats()
        self._saved_s = self._spent_s = 0.0
        self._hits = self._foreseen = 0.0
        self._num_recent = 0
        self._pause = 0

    @property
    def is_open(self) -> bool:
        """Whether to draft ahead."""
        return self._pause == 0

    @property
    def floor(self) -> float:
        """Probability from which on an outcome is prepared for: higher when hits are rarer than foreseen."""
        ratio = (self._foreseen + PRIOR_HITS) / (self._hits + PRIOR_HITS)
        return MIN_OUTCOME * min(3.0, max(0.5, ratio))

    def looked_up(self, *, is_hit: bool, foreseen: float, saved_s: float) -> None:
        """Note a request.

        Args:
            is_hit: Whether its proposal was ready.
            foreseen: The probability that it would be, as far as the draft could tell.
            saved_s: Forwards and messages it did not have to wait for, in seconds.
        """
        self.stats.lookups += 1
        self.stats.hits += is_hit
        if self._pause:
            self._pause -= 1
            return
        self._saved_s = DECAY * self._saved_s + saved_s
        self._spent_s *= DECAY
        self._hits = SLOW_DECAY * self._hits + is_hit
        self._foreseen = SLOW_DECAY * self._foreseen + foreseen
        self._num_recent += 1
        if self._num_recent >= MIN_LOOKUPS and self._spent_s > self._saved_s:
            self._pause = PAUSE
            self._num_recent, self._saved_s, self._spent_s = 0, 0.0, 0.0

    def worked(self, num_rows: int, stolen_s: float, num_forwards: int = 1) -> None:
        """Note forwards of draft-ahead that others waited `stolen_s` seconds for."""
        self.stats.forwards += num_forwards
        self.stats.rows += num_rows
        self._spent_s += stolen_s

    def delayed(self, seconds: float) -> None:
        """Note that a request waited for draft-ahead to make way."""
        self._spent_s += seconds


MIN_SENT = 0.25
"""Proposals are sent in company until they make up this probability: a message costs what a forward does."""

ROUND_TRIP = 2
"""Forwards that asking for a proposal and being answered takes as long as, at the least: the network is free
of charge here."""

_log = logging.getLogger(__name__)


class Lookahead:
    """Prepares the next proposals of sessions, the likeliest outcomes of all of them first.

    Args:
        engine: The draft model and its cache.
        max_rows: Upper bound of tokens in one forward.
        stop: Set while somebody waits for the engine.

    Attributes:
        throttle: Whether it pays, and its counters.
    """

    def __init__(self, engine: Engine, max_rows: int, stop: c_int32) -> None:
        self.throttle = Throttle()
        self._engine, self._max_rows, self._stop = engine, max_rows, stop
        self._pending: dict[str, tuple[Speculation, ProposeTask]] = {}
        self._began = self._ended = 0.0
        self._giving_way = IdlePriority() if engine.device.type == "cpu" and can_give_way() else None

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._pending)

    def add(self, speculation: Speculation, task: ProposeTask) -> None:
        """Prepare for what may follow the proposal that was just made for a task."""
        if self.throttle.is_open:
            self._pending[speculation.session.session_id] = speculation, task

    def drop(self, session_id: str) -> None:
        """Leave a session alone."""
        self._pending.pop(session_id, None)

    def note_answer(
        self, speculation: Speculation, num_forwards: int, forward_s: float, *, was_at_hand: bool
    ) -> None:
        """Note that the proposal that was asked for was sent.

        Args:
            speculation: Its session's.
            num_forwards: Forwards that it took since it was asked for.
            forward_s: Seconds of a forward.
            was_at_hand: Whether it was sent before it was asked for.
        """
        reading, foreseen = speculation.sent, speculation.foreseen
        assert reading is not None
        speculation.note_use((reading.root, *reading.nodes))
        self.throttle.stats.used_rows += speculation.num_used
        speculation.num_used = 0
        if foreseen is not None:
            saved = max(0, reading.depth - num_forwards) + (ROUND_TRIP if was_at_hand else 0)
            self.throttle.looked_up(is_hit=num_forwards == 0, foreseen=foreseen, saved_s=saved * forward_s)

    def note_arrival(self, arrived: float) -> None:
        """Note a request, by `time.monotonic()` of its arrival: it may have waited for a forward of ours."""
        waited = self._ended - max(self._began, arrived)
        if waited > 0:
            self.throttle.delayed(waited)

    def preempt(self) -> None:
        """Have the forward under way done soon: somebody waits for the engine. For any thread to call."""
        if self._giving_way is not None:
            self._giving_way.preempt()

    def step(self) -> list[Prepared]:
        """Feed the open nodes that are likeliest to be of use; return what is whole by it."""
        self._began, began_cpu = time.monotonic(), time.thread_time()
        pending = list(self._pending.values())
        chosen, run_length = self._choose()
        if not chosen:
            return self._whole(pending, 0.0)
        num_rows, num_forwards = sum(map(len, chosen.values())), 1
        try:
            if run_length > 1:
                num_rows = num_forwards = self._run(chosen, run_length)
            else:
                self._forward(chosen)
        except CacheFullError:
            self._pending.clear()
        except Exception:
            _log.exception("drafting ahead over %d sessions failed", len(chosen))
            for speculation in chosen:
                self._engine.release(speculation.session.session_id)
            self._pending.clear()
        self._ended = time.monotonic()
        stolen_s = 0.0
        if self._engine.device.type == "cpu" and self._giving_way is None:
            # While this thread waited for its core, somebody ran who will now be done later.
            stolen_s = max(0.0, self._ended - self._began - (time.thread_time() - began_cpu))
        self.throttle.worked(num_rows, stolen_s, num_forwards)
        return self._whole(pending, MIN_SENT)

    def _whole(self, pending: list[tuple[Speculation, ProposeTask]], least: float) -> list[Prepared]:
        """What is whole by now and was not returned before, where it is at least so likely together."""
        return [
            Prepared(task, [node.token_id for node in reading.root.path()], reading.proposal())
            for speculation, task in pending
            if speculation.ahead is not None and task.wants_ahead and not task.cancelled
            for reading in speculation.ahead.take_whole(least)
        ]

    def _choose(self) -> tuple[dict[Speculation, list[Node]], int]:
        """Return the nodes to feed; and how many forwards to take in one call, along the line of one node."""
        candidates: list[tuple[float, Speculation, Node, int]] = []
        for session_id, (speculation, _) in list(self._pending.items()):
            wanted = self._wanted(speculation)
            if wanted:
                candidates += [(weight, speculation, node, length) for weight, node, length in wanted]
            else:
                del self._pending[session_id]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        if candidates and len(self._pending) == 1:
            _, speculation, node, length = candidates[0]
            if length > 1 and speculation.can_run(self._engine, [node]):
                return {speculation: [node]}, length
        chosen: dict[Speculation, list[Node]] = {}
        for _, speculation, node, _ in candidates[: self._max_rows]:
            chosen.setdefault(speculation, []).append(node)
        return chosen, 1

    def _wanted(self, speculation: Speculation) -> list[tuple[float, Node, int]]:
        """What a session would have fed; nothing when its cache is gone or others would have to make room."""
        engine, tree, session_id = self._engine, speculation.tree, speculation.session.session_id
        num_slots = tree.chain_length + len(tree.beside) + max(self._max_rows, RUN)
        if not (
            speculation.has_noise and speculation.is_held(engine) and engine.has_room(session_id, num_slots)
        ):
            return []
        if speculation.ahead is None:
            assert speculation.sent is not None
            speculation.ahead = OutcomeSet(speculation.sent, speculation.read_outcome, self.throttle.floor)
        return speculation.ahead.wanted()

    def _run(self, chosen: dict[Speculation, list[Node]], length: int) -> int:
        """Feed up to `length` tokens from the node on, and return how many it were."""
        ((speculation, (node,)),) = chosen.items()
        length = min(length, self._engine.max_context - node.position)
        token_ids, logits = speculation.run(
            self._engine, node, length, stop=self._stop, within=self._giving_way
        )
        for fed in speculation.open_run(self._engine, node, token_ids, logits):
            fed.is_ahead = True
        return len(token_ids)

    def _forward(self, chosen: dict[Speculation, list[Node]]) -> None:
        feeds = [speculation.feed(nodes) for speculation, nodes in chosen.items()]
        results = self._engine.step(feeds, self._giving_way)
        for (speculation, nodes), logits in zip(chosen.items(), results, strict=True):
            speculation.open(nodes, logits)
            for node in nodes:
                node.is_ahead = True
