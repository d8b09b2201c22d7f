"""Conversion of cycles to the records of a session's trace."""

from __future__ import annotations

import time
from collections.abc import Mapping

from gammaray.types import TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.enums import DRAFTERS, ORIGINS
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Call, Cycle


def cycle_record(
    session: Session, cycle: Cycle, base_position: int, draft: Call | None, target: Call | None, clock_ns: int
) -> pb.CycleRecord:
    """Return the record of a cycle; `clock_ns` is the Unix time at which `time.perf_counter()` was 0."""
    record = pb.CycleRecord(
        start_us=(clock_ns + round(cycle.started * 1e9)) // 1000,
        total_us=int(cycle.total_s * 1e6),
        propose_us=int(cycle.draft_s * 1e6),
        verify_us=int(cycle.verify_s * 1e6),
        turn=session.turn,
        epoch=session.epoch,
        base_position=base_position,
        gamma=cycle.gamma,
        gamma_reason=cycle.shape.reason,
        drafted=cycle.num_drafted,
        tested=cycle.num_tested,
        accepted=cycle.num_accepted,
        emitted=len(cycle.token_ids),
        drafter=DRAFTERS[cycle.drafter],
        draft_failed=cycle.draft_failed,
        draft_ahead_hit=cycle.is_prepared,
        drafter_version=cycle.drafter_version,
    )
    if cycle.origins and cycle.origins[-1] is not TokenOrigin.ACCEPTED:
        record.next_origin = ORIGINS[cycle.origins[-1]]
    if draft is not None and draft.blocks:
        record.draft.CopyFrom(worker_call(draft))
    if target is not None and (target.blocks or target.results):
        record.target.CopyFrom(worker_call(target))
    return record


def failed_record(session: Session, calls: Mapping[str, Call], clock_ns: int) -> pb.CycleRecord:
    """Return the record of an unfinished cycle that failed; for sampled sessions, whose calls have times."""
    now = time.perf_counter()
    start = min(call.began or now for call in calls.values())
    record = pb.CycleRecord(
        start_us=(clock_ns + round(start * 1e9)) // 1000,
        total_us=int((now - start) * 1e6),
        turn=session.turn,
        epoch=session.epoch,
        base_position=session.num_committed,
    )
    for role, call in calls.items():
        took_us = int(((call.ended or now) - (call.began or now)) * 1e6)
        if role == "draft":
            record.propose_us, record.gamma = took_us, call.blocks[0].gamma if call.blocks else 0
            record.draft.CopyFrom(worker_call(call))
        else:
            record.verify_us = took_us
            record.target.CopyFrom(worker_call(call))
    return record


def worker_call(call: Call) -> pb.WorkerCall:
    record = pb.WorkerCall(
        address=call.address,
        blocks=len(call.blocks),
        request_bytes=sum(block.ByteSize() for block in call.blocks),
        response_bytes=sum(result.ByteSize() for result in call.results if result is not None),
        error=call.error,
    )
    if len(call.blocks) > 1:
        record.refed_tokens = sum(len(block.context.token_ids) for block in call.blocks[1:])
    answer = call.results[-1] if call.results else None
    if answer is not None and answer.timing is not None:
        record.timing.CopyFrom(answer.timing)
    return record
