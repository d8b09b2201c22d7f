"""Cycle records of a session: tokens and time per phase of each cycle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gammaray.types import DrafterKind, TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import values_of
from gammaray.wire.enums import DRAFTERS_BACK, ORIGINS_BACK


@dataclass(frozen=True)
class WorkerCall:
    address: str  # host:port of the worker that answered last
    blocks: int  # blocks sent: above 1 if the worker lacked tokens, or was replaced by another
    refed_tokens: int  # tokens sent again because a worker lacked them
    request_bytes: int
    response_bytes: int
    queue_s: float  # seconds from the block's arrival to its first step
    compute_s: float  # seconds of the steps that served it, shared by the batch
    batch_size: int  # sessions in the largest of these batches
    error: str  # class of the last failure, or empty


@dataclass(frozen=True)
class CycleRecord:
    start_s: float  # as Unix time in seconds, by its orchestrator's clock
    total_s: float  # duration
    propose_s: float  # seconds spent waiting for the proposal
    verify_s: float  # seconds spent waiting for the verification
    turn: int
    epoch: int  # fencing number of the session's owner; incremented with each takeover
    base_position: int  # number of committed tokens before the cycle
    gamma: int  # draft tokens requested
    gamma_reason: str  # why the controller chose this gamma
    drafted: int  # nodes of the proposal
    tested: int
    accepted: int  # proposed tokens
    emitted: int
    next_origin: TokenOrigin | None  # correction or bonus; None if the completion ended before it
    drafter: DrafterKind  # that proposed
    draft_failed: bool  # whether the drafter failed, was late or was absent
    draft_ahead_hit: bool  # whether the proposal had been prepared ahead
    drafter_version: int  # version of the head or draft model that proposed, if it is trained while it serves
    draft: WorkerCall | None  # calls of the draft worker; None if there were none
    target: WorkerCall | None  # calls of the target worker


def cycles_from_proto(messages: Iterable[pb.CycleRecord]) -> list[CycleRecord]:
    """Return the cycles of a response, sorted by execution order; the stored order may differ."""
    return sorted(map(_cycle, messages), key=lambda cycle: (cycle.turn, cycle.epoch, cycle.start_s))


def _cycle(message: pb.CycleRecord) -> CycleRecord:
    names = ("start", "total", "propose", "verify")
    values = values_of(message, CycleRecord) | {
        **{f"{name}_s": getattr(message, f"{name}_us") * 1e-6 for name in names},
        "next_origin": ORIGINS_BACK.get(message.next_origin),
        "drafter": DRAFTERS_BACK.get(message.drafter, DrafterKind.NONE),
        "draft": _call(message.draft) if message.HasField("draft") else None,
        "target": _call(message.target) if message.HasField("target") else None,
    }
    return CycleRecord(**values)


def _call(message: pb.WorkerCall) -> WorkerCall:
    timing = message.timing
    times: dict[str, Any] = {"queue_s": timing.queue_us * 1e-6, "compute_s": timing.compute_us * 1e-6}
    return WorkerCall(**values_of(message, WorkerCall), **times, batch_size=timing.batch_size)
