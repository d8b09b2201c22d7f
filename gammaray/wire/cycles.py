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
    """The calls of a worker in one cycle.

    Args:
        address: host:port of the worker that answered last.
        blocks: Blocks sent: above 1 if the worker lacked tokens, or was replaced by another.
        refed_tokens: Tokens sent again because a worker lacked them.
        queue_s: Seconds from the block's arrival to its first step.
        compute_s: Seconds of the steps that served it, shared by the batch.
        batch_size: Sessions in the largest of these batches.
        error: Class of the last failure, or empty.
    """

    address: str
    blocks: int
    refed_tokens: int
    request_bytes: int
    response_bytes: int
    queue_s: float
    compute_s: float
    batch_size: int
    error: str


@dataclass(frozen=True)
class CycleRecord:
    """One cycle.

    Args:
        start_s: Start as Unix time in seconds, by its orchestrator's clock.
        total_s: Duration in seconds.
        propose_s: Seconds spent waiting for the proposal.
        verify_s: Seconds spent waiting for the verification.
        epoch: Fencing number of the session's owner; incremented with each takeover.
        base_position: Number of committed tokens before the cycle.
        gamma: Draft tokens requested.
        gamma_reason: Why the controller chose this gamma.
        drafted: Nodes of the proposal.
        tested: Proposed tokens that were tested.
        accepted: Proposed tokens that were accepted.
        next_origin: Correction or bonus; None if the completion ended before it.
        drafter: Kind of the drafter that proposed.
        draft_failed: Whether the drafter failed, was late or was absent.
        draft_ahead_hit: Whether the proposal had been prepared ahead.
        drafter_version: Version of the head or draft model that proposed, if it is trained while it serves.
        draft: Calls of the draft worker; None if there were none.
        target: Calls of the target worker.
    """

    start_s: float
    total_s: float
    propose_s: float
    verify_s: float
    turn: int
    epoch: int
    base_position: int
    gamma: int
    gamma_reason: str
    drafted: int
    tested: int
    accepted: int
    emitted: int
    next_origin: TokenOrigin | None
    drafter: DrafterKind
    draft_failed: bool
    draft_ahead_hit: bool
    drafter_version: int
    draft: WorkerCall | None
    target: WorkerCall | None


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
