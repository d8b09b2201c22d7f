"""Where the time of a cycle goes: the workers asked directly, over streams of their own.

The workers tell with each answer how long its model forwards took. The probe runs cycles against the workers
of a running cluster and notes those times and its own waits; set against the cycles of the whole stack they
leave what gRPC, orchestrator and Redis cost.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from rich.table import Table

from gammaray import AsyncClient
from gammaray.bench.tables import plain_table
from gammaray.errors import InternalError, UnavailableError
from gammaray.types import GammaPolicy
from gammaray.v1 import draft_service_pb2 as draft
from gammaray.v1 import draft_service_pb2_grpc as draft_grpc
from gammaray.v1 import target_service_pb2 as target
from gammaray.v1 import target_service_pb2_grpc as target_grpc
from gammaray.v1 import types_pb2 as types

__all__ = ["ProbedCycle", "WorkerProbe", "cycle_cost", "cycle_cost_table", "running_probe"]

_ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class ProbedCycle:
    """Milliseconds of one cycle: the caller's waits, and the workers' own times within them.

    Attributes:
        wait_ms: Both waits.
        compute_ms: Of these, spent by the workers.
        draft_ms: Of these, in the draft's forwards.
        verify_ms: Of these, in the target's forward.
        is_ahead: Whether the proposal had arrived before it was requested.
    """

    wait_ms: float
    compute_ms: float
    draft_ms: float
    verify_ms: float
    is_ahead: bool = False

    @property
    def forward_ms(self) -> float:
        """Both models' forwards."""
        return self.draft_ms + self.verify_ms


@dataclass(frozen=True)
class _Cost:
    """Milliseconds of one call."""

    wait_ms: float = 0.0
    compute_ms: float = 0.0
    forward_ms: float = 0.0


class WorkerProbe:
    """Greedy cycles against one draft and one target worker; make one with `running_probe`."""

    def __init__(self, propose: grpc.aio.StreamStreamCall, verify: grpc.aio.StreamStreamCall) -> None:
        self._propose, self._verify = propose, verify
        self._request_id = 0

    async def run(self, prompt: Sequence[int], policy: GammaPolicy, num_cycles: int) -> list[ProbedCycle]:
        """Return the cycles after the first one, whose times contain the prefill; the gamma is fixed.

        Raises:
            InternalError: A worker refused a block.
        """
        session_id, committed = f"probe-{uuid.uuid4().hex}", list(prompt)
        spec = types.SessionSpec(
            sampling=types.SamplingParams(temperature=0.0, seed=0),
            verification=types.VERIFICATION_METHOD_COUPLED,
            prompt_length=len(prompt),
        )
        cycles: list[ProbedCycle] = []
        start = 0
        for i in range(num_cycles + 1):
            first = {"spec": spec} if i == 0 else {}
            block = {
                "session_id": session_id,
                "epoch": 1,
                "base_position": len(committed),
                "context": types.TokenSpan(start=start, token_ids=committed[start:]),
                **first,
            }
            proposal, drafted, is_ahead = await self._ask_draft(block, policy)
            verdict, verified = await self._ask_target(block, proposal)
            start = len(committed)
            committed += [proposal.token_ids[node] for node in verdict.accepted_path]
            committed.append(verdict.next_token_id)
            if i > 0:
                wait_ms = drafted.wait_ms + verified.wait_ms
                compute_ms = drafted.compute_ms + verified.compute_ms
                forwards = (drafted.forward_ms, verified.forward_ms)
                cycles.append(ProbedCycle(wait_ms, compute_ms, *forwards, is_ahead))
        release = [types.ReleaseSession(session_id=session_id)]
        await self._propose.write(draft.ProposeRequest(releases=release))
        await self._verify.write(target.VerifyRequest(releases=release))
        return cycles

    async def _ask_draft(
        self, block: dict[str, Any], policy: GammaPolicy
    ) -> tuple[types.Proposal, _Cost, bool]:
        if not policy.fixed:
            return types.Proposal(), _Cost(), False
        shape = {"gamma": policy.fixed, "max_nodes": policy.max_nodes}
        request = draft.ProposeBlock(request_id=self._next_id(), **shape, **block)
        frame = draft.ProposeRequest(blocks=[request])
        result, cost = await _exchange(self._propose, frame, "proposal")
        return result.proposal, cost, result.num_forwards == 0

    async def _ask_target(
        self, block: dict[str, Any], proposal: types.Proposal
    ) -> tuple[target.Verdict, _Cost]:
        request = target.VerifyBlock(request_id=self._next_id(), proposal=proposal, **block)
        result, cost = await _exchange(self._verify, target.VerifyRequest(blocks=[request]), "verdict")
        return result.verdict, cost

    def _next_id(self) -> int:
        self._request_id += 1
        return self._request_id


async def _exchange(stream: grpc.aio.StreamStreamCall, frame: Any, wanted: str) -> tuple[Any, _Cost]:
    """Send one frame and return its one result and what it cost."""
    started = time.perf_counter()
    await stream.write(frame)
    answer = await asyncio.wait_for(stream.read(), _ANSWER_TIMEOUT_S)
    wait_ms = (time.perf_counter() - started) * 1e3
    if answer is grpc.aio.EOF or len(answer.results) != 1:
        raise InternalError("a worker answered one block with another number of results")
    result = answer.results[0]
    if result.WhichOneof("outcome") != wanted:
        raise InternalError(f"a worker answered with no {wanted}: {result}")
    return result, _Cost(wait_ms, result.timing.compute_us / 1e3, result.timing.forward_us / 1e3)


@asynccontextmanager
async def running_probe(client: AsyncClient) -> AsyncIterator[WorkerProbe]:
    """Open streams to the first draft and the first target worker of the client's cluster.

    Raises:
        UnavailableError: The cluster names no such worker.
    """
    addresses = {status.role: status.address for status in await client.status() if status.healthy}
    if missing := {"draft", "target"} - addresses.keys():
        raise UnavailableError(f"no healthy {' and no '.join(sorted(missing))} worker")
    async with (
        grpc.aio.insecure_channel(addresses["draft"]) as draft_channel,
        grpc.aio.insecure_channel(addresses["target"]) as target_channel,
    ):
        propose = draft_grpc.DraftServiceStub(draft_channel).Propose()
        verify = target_grpc.TargetServiceStub(target_channel).Verify()
        yield WorkerProbe(propose, verify)
        propose.cancel()
        verify.cancel()


def cycle_cost(gamma: str, stack_cycle_ms: Sequence[float], probed: Sequence[ProbedCycle]) -> dict[str, Any]:
    """Return medians of the parts of a cycle, in milliseconds, and the share of the overhead.

    `draft_ms` is of proposals that were made when asked for, if there were any.

    Args:
        gamma: The fixed gamma of all cycles, as `parse_gamma` reads it.
        stack_cycle_ms: Times of a cycle through the whole stack, prefill left out, one per completion.
        probed: Cycles of the probe, run in between.
    """
    cycle = statistics.median(stack_cycle_ms)
    wait = statistics.median(one.wait_ms for one in probed)
    compute = statistics.median(one.compute_ms for one in probed)
    forward = statistics.median(one.forward_ms for one in probed)
    asked = [one for one in probed if not one.is_ahead] or probed
    return {
        "gamma": gamma,
        "cycle_ms": cycle,
        "forward_ms": forward,
        "draft_ms": statistics.median(one.draft_ms for one in asked),
        "verify_ms": statistics.median(one.verify_ms for one in probed),
        "worker_ms": compute - forward,
        "wire_ms": wait - compute,
        "orchestrator_ms": cycle - wait,
        "overhead_ms": cycle - forward,
        "overhead_percent": 100 * (cycle - forward) / cycle,
    }


def cycle_cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    """Return where the time of a cycle goes, one row per gamma."""
    columns = ("gamma", "cycle", "forwards", "workers", "gRPC", "orchestrator, Redis", "overhead", "%")
    table = plain_table("Overhead of a cycle over the model forwards (median ms)", columns)
    for cost in costs:
        parts = ("cycle_ms", "forward_ms", "worker_ms", "wire_ms", "orchestrator_ms", "overhead_ms")
        cells = [f"{cost[part]:.2f}" for part in parts]
        table.add_row(str(cost["gamma"]), *cells, f"{cost['overhead_percent']:.1f}")
    return table
