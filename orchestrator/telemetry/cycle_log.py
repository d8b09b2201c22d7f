"""Log of a session's cycles: each cycle only adds references, a background task writes the records later.

Every session has a cycle log. The records of a stored session go to the store, where `gammaray trace` finds
them. They become the spans of its cycles when the session is sampled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gammaray.aio import BackgroundTasks
from gammaray.errors import GammarayError
from gammaray.v1 import generation_service_pb2 as pb
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Call, Cycle
from orchestrator.storage.trace_store import RedisTraceStore
from orchestrator.telemetry.records import cycle_record, failed_record
from orchestrator.telemetry.spans import SessionTrace

_log = logging.getLogger(__name__)

MAX_RECORDS = 4096
"""Cycles of one turn and owner that the store keeps; a trace contains all of them."""

FLUSH_CYCLES, FLUSH_S = 32, 1.0
"""Records are flushed after this many cycles or seconds."""

_SLICE = 4
"""Records built before control returns to the event loop; spans take longer and are made one by one."""


@dataclass(slots=True)
class _Entry:
    index: int  # number of the cycle, from 0
    cycle: Cycle
    base_position: int  # tokens committed before it
    draft: Call | None  # call to the draft worker; None without one, or while it still prefills a prompt
    target: Call | None
    stored: float = 0.0  # `time.perf_counter()` when its tokens were stored; 0 when not recorded


class CycleLog:
    """The cycle log of one session with one owner; a `store` keeps its records, a `trace` its spans."""

    def __init__(
        self,
        session: Session,
        store: RedisTraceStore | None,
        background: BackgroundTasks,
        trace: SessionTrace | None = None,
    ) -> None:
        self._session, self._store, self._trace = session, store, trace
        self._background = background
        self._clock_ns = time.time_ns() - time.perf_counter_ns()
        self._calls: dict[str, Call] = {}
        self._readings: list[tuple[int, Call]] = []
        self._entries: list[_Entry] = []
        self._num_cycles = self._num_stored = 0
        self._flushed = time.perf_counter()

    def call(self, role: str, address: str) -> Call:
        """Return the record of this cycle's call to a worker."""
        call = self._calls.get(role)
        if call is None:
            trace, index = self._trace, self._num_cycles
            parents = () if trace is None else (trace.parent_of(role, i) for i in (index, index + 1))
            call = self._calls[role] = Call(*parents)
        call.address, call.error = address, ""
        return call

    def observe(self, cycle: Cycle) -> None:
        draft = self._calls.pop("draft", None)
        if draft is not None and not draft.is_over:  # prefills a long prompt concurrently
            self._readings.append((self._num_cycles, draft))
            if self._trace is not None:
                self._trace.readings.add(self._num_cycles)
            draft = None
        base_position = self._session.num_committed - len(cycle.token_ids)
        target = self._calls.pop("target", None)
        self._entries.append(_Entry(self._num_cycles, cycle, base_position, draft, target))
        self._num_cycles += 1

    def stored(self) -> None:
        """Record that the tokens of the oldest unstored cycle are stored."""
        index = self._num_stored - (self._num_cycles - len(self._entries))
        self._num_stored += 1
        if self._trace is not None:
            self._entries[index].stored = time.perf_counter()
        started = self._entries[index].cycle.started
        if index + 1 >= FLUSH_CYCLES or started - self._flushed > FLUSH_S:
            self._flushed = started
            self._flush(index + 1)

    def finish(self, error: BaseException | None = None) -> None:
        """Flush the remaining entries in the background; `error` ended the generation, maybe in a cycle."""
        self._flush(len(self._entries))
        trace = self._trace
        if trace is None:
            return
        trace.num_cycles = self._num_cycles
        for index, call in self._readings:
            trace.add_reading(index, call, self._clock_ns)
        if self._calls and error is not None:
            record = failed_record(self._session, self._calls, self._clock_ns)
            is_cancelled = isinstance(error, (GeneratorExit, asyncio.CancelledError))
            name = "" if is_cancelled else type(error).__name__
            trace.add_cycle(self._num_cycles, record, error=name)

    def _flush(self, count: int) -> None:
        entries, self._entries = self._entries[:count], self._entries[count:]
        if entries and (self._store is not None or self._trace is not None):
            self._background.start(self._write(entries), self._session.session_id)

    async def _write(self, entries: Sequence[_Entry]) -> None:
        session, trace = self._session, self._trace
        answer = pb.GetSessionTraceResponse()
        for number, entry in enumerate(entries, start=1):
            record = cycle_record(
                session, entry.cycle, entry.base_position, entry.draft, entry.target, self._clock_ns
            )
            if entry.index < MAX_RECORDS:
                answer.cycles.append(record)
            if trace is not None:
                stored_ns = self._clock_ns + round(entry.stored * 1e9) if entry.stored else 0
                trace.add_cycle(entry.index, record, stored_ns=stored_ns)
            if trace is not None or number % _SLICE == 0:
                await asyncio.sleep(0)
        if answer.cycles and self._store is not None:
            try:
                await self._store.append(session.session_id, session.epoch, answer.SerializeToString())
            except GammarayError as error:
                _log.debug("lost records of session %s: %s", session.session_id, error)
