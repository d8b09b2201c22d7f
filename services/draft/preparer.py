"""Runs draft-ahead: one small forward at a time over the sessions that wait for their verdicts."""

from __future__ import annotations

import logging
import time
from ctypes import c_int32

from services.draft.ahead import Ahead
from services.draft.priority import GivingWay, can_give_way
from services.draft.speculation import Speculation
from services.draft.throttle import Throttle
from services.draft.tree import Node
from services.engine.engine import Engine
from services.engine.errors import CacheFullError
from services.tasks import Prepared, ProposeTask

__all__ = ["Preparer"]

MIN_SENT = 0.25
"""Proposals are sent in company until they make up this probability: a message costs what a forward does."""

RUN = 4
"""Forwards in one call, along the likeliest line of a session that is alone."""

ROUND_TRIP = 2
"""Forwards that asking for a proposal and being answered takes as long as, at the least: the network is free
of charge here."""

_log = logging.getLogger(__name__)


class Preparer:
    """Prepares the next proposals of sessions, the likeliest outcomes of all of them first.

    Args:
        engine: The draft model and its cache.
        max_rows: Upper bound of tokens in one forward.

    Attributes:
        throttle: Whether it pays, and its counters.
    """

    def __init__(self, engine: Engine, max_rows: int) -> None:
        self.throttle = Throttle()
        self._engine, self._max_rows = engine, max_rows
        self._pending: dict[str, tuple[Speculation, ProposeTask]] = {}
        self._began = self._ended = 0.0
        self._stop = c_int32()
        self._giving_way = GivingWay() if engine.device.type == "cpu" and can_give_way() else None

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

    def hurry(self) -> None:
        """Have the forward under way done soon: somebody waits for the engine. For any thread to call."""
        self._stop.value = 1
        if self._giving_way is not None:
            self._giving_way.hurry()

    def step(self) -> list[Prepared]:
        """Feed the open nodes that are likeliest to be of use; return what is whole by it.

        It takes one forward, or a few of one row each along a session's likeliest line.
        """
        self._began, began_cpu = time.monotonic(), time.thread_time()
        pending = list(self._pending.values())
        chosen = self._choose()
        if not chosen:
            return self._whole(pending, 0.0)
        num_rows = 0
        try:
            num_rows = self._feed(chosen)
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
        self.throttle.worked(num_rows, stolen_s)
        return self._whole(pending, MIN_SENT)

    def _whole(self, pending: list[tuple[Speculation, ProposeTask]], least: float) -> list[Prepared]:
        """What is whole by now and was not returned before, where it is at least so likely together."""
        return [
            Prepared(task, [node.token_id for node in reading.root.path()], reading.proposal())
            for speculation, task in pending
            if speculation.ahead is not None and task.wants_ahead and not task.cancelled
            for reading in speculation.ahead.take_whole(least)
        ]

    def _choose(self) -> dict[Speculation, list[Node]]:
        candidates: list[tuple[float, Speculation, Node]] = []
        for session_id, (speculation, _) in list(self._pending.items()):
            wanted = self._wanted(speculation)
            if wanted:
                candidates += [(probability, speculation, node) for probability, node in wanted]
            else:
                del self._pending[session_id]
        candidates.sort(key=lambda candidate: candidate[0], reverse=True)
        if candidates and len(self._pending) == 1:
            _, speculation, node = candidates[0]
            if speculation.can_run(self._engine, [node]):
                return {speculation: [node]}
        chosen: dict[Speculation, list[Node]] = {}
        for _, speculation, node in candidates[: self._max_rows]:
            chosen.setdefault(speculation, []).append(node)
        return chosen

    def _wanted(self, speculation: Speculation) -> list[tuple[float, Node]]:
        """What a session would have fed; nothing when its cache is gone or others would have to make room."""
        engine, tree, session_id = self._engine, speculation.tree, speculation.session.session_id
        num_slots = tree.chain_length + len(tree.beside) + max(self._max_rows, RUN)
        if not (
            speculation.has_noise and speculation.is_held(engine) and engine.has_room(session_id, num_slots)
        ):
            return []
        if speculation.ahead is None:
            assert speculation.sent is not None
            speculation.ahead = Ahead(speculation.sent, speculation.read_outcome, self.throttle.floor)
        return speculation.ahead.wanted()

    def _feed(self, chosen: dict[Speculation, list[Node]]) -> int:
        """Feed what was chosen; return how many rows that took."""
        engine, within = self._engine, self._giving_way
        (speculation, nodes), *others = chosen.items()
        if not others and speculation.can_run(engine, nodes):
            self._stop.value = 0
            count = min(RUN, engine.max_context - nodes[0].position)
            token_ids, logits = speculation.run(engine, nodes[0], count, stop=self._stop, within=within)
            for node in speculation.open_run(engine, nodes[0], token_ids, logits):
                node.is_ahead = True
            return len(token_ids)
        feeds = [speculation.feed(nodes) for speculation, nodes in chosen.items()]
        results = engine.step(feeds, within)
        for (speculation, nodes), logits in zip(chosen.items(), results, strict=True):
            speculation.open(nodes, logits)
            for node in nodes:
                node.is_ahead = True
        return sum(map(len, chosen.values()))
