"""Runs draft-ahead: small forwards over the sessions that wait for their verdicts."""

from __future__ import annotations

import logging
import time
from ctypes import c_int32

from services.draft.ahead import Ahead
from services.draft.priority import GivingWay, can_give_way
from services.draft.reading import RUN
from services.draft.speculation import Speculation
from services.draft.throttle import Throttle
from services.draft.tree import Node
from services.engine.core.errors import CacheFullError
from services.engine.engine import Engine
from services.scheduling.tasks import Prepared, ProposeTask

__all__ = ["Preparer"]

MIN_SENT = 0.25
"""Proposals are sent in company until they make up this probability: a message costs what a forward does."""

ROUND_TRIP = 2
"""Forwards that asking for a proposal and being answered takes as long as, at the least: the network is free
of charge here."""

_log = logging.getLogger(__name__)


class Preparer:
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
        if self._giving_way is not None:
            self._giving_way.hurry()

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
            speculation.ahead = Ahead(speculation.sent, speculation.read_outcome, self.throttle.floor)
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
