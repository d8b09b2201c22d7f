"""What each cycle of a session did and where its time went: the session's own records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gammaray.types import DrafterKind, TokenOrigin
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.enums import DRAFTERS_BACK, ORIGINS_BACK

__all__ = ["CycleRecord", "WorkerCall", "cycles_from_proto"]


@dataclass(frozen=True)
class WorkerCall:
    """What a worker was asked in one cycle.

    Args:
        address: host:port of the worker that answered last.
        blocks: Blocks sent: above 1 after the worker asked for tokens it lacked, or was left for another.
        refed_tokens: Tokens sent again since a worker lacked them.
        request_bytes: Bytes of the blocks.
        response_bytes: Bytes of the answers.
        queue_s: Seconds from the block's arrival to its first step.
        compute_s: Seconds of the steps that served it, which the batch shares.
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
        start_s: Seconds since 1970 at which it began, by its orchestrator's clock.
        total_s: Seconds that it took.
        propose_s: Seconds of them waited for the proposal.
        verify_s: Seconds of them waited for the verdict.
        turn: Turn of the session.
        epoch: Fencing number of the session's owner: grows with each takeover.
        base_position: Committed tokens that it built on.
        gamma: Draft tokens asked for.
        gamma_reason: Why the controller chose this gamma.
        drafted: Nodes of the proposal.
        tested: Proposed tokens put to the test.
        accepted: Proposed tokens that the target agreed with.
        emitted: Tokens emitted.
        next_origin: Correction or bonus; None when the completion ended before it.
        drafter: Who proposed: the rung of the ladder.
        draft_failed: Whether the drafter failed, was late or was absent.
        draft_ahead_hit: Whether the proposal had been prepared ahead.
        draft: The draft worker's part, None when none was asked.
        target: The target worker's part.
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
    draft: WorkerCall | None
    target: WorkerCall | None


def cycles_from_proto(messages: Iterable[pb.CycleRecord]) -> list[CycleRecord]:
    """Return the cycles of an answer in the order in which they were run; they may be stored in another."""
    return sorted(map(_cycle, messages), key=lambda cycle: (cycle.turn, cycle.epoch, cycle.start_s))


def _cycle(message: pb.CycleRecord) -> CycleRecord:
    return CycleRecord(
        start_s=message.start_us * 1e-6,
        total_s=message.total_us * 1e-6,
        propose_s=message.propose_us * 1e-6,
        verify_s=message.verify_us * 1e-6,
        turn=message.turn,
        epoch=message.epoch,
        base_position=message.base_position,
        gamma=message.gamma,
        gamma_reason=message.gamma_reason,
        drafted=message.drafted,
        tested=message.tested,
        accepted=message.accepted,
        emitted=message.emitted,
        next_origin=ORIGINS_BACK.get(message.next_origin),
        drafter=DRAFTERS_BACK.get(message.drafter, DrafterKind.NONE),
        draft_failed=message.draft_failed,
        draft_ahead_hit=message.draft_ahead_hit,
        draft=_call(message.draft) if message.HasField("draft") else None,
        target=_call(message.target) if message.HasField("target") else None,
    )


def _call(message: pb.WorkerCall) -> WorkerCall:
    return WorkerCall(
        address=message.address,
        blocks=message.blocks,
        refed_tokens=message.refed_tokens,
        request_bytes=message.request_bytes,
        response_bytes=message.response_bytes,
        queue_s=message.timing.queue_us * 1e-6,
        compute_s=message.timing.compute_us * 1e-6,
        batch_size=message.timing.batch_size,
        error=message.error,
    )
