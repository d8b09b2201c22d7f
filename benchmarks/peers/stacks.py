"""gammaray's cluster in a comparison: its requests, and the times of a completion at the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from benchmarks.cluster import START_TIMEOUT_S, running_cluster
from gammaray import AsyncClient
from gammaray.bench.systems import Ask, Sample, Stack
from gammaray.client.request import GenerateOptions
from gammaray.wire.cycles import CycleRecord

_WORKERS_TIMEOUT_S = 120.0
_TRACE_TIMEOUT_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Variant:
    """One way to ask the cluster.

    Args:
        name: Name in results; begins with "gammaray-".
        options: Options of each request, with an adaptive gamma unless they name one.
    """

    name: str
    options: GenerateOptions


VARIANTS = (
    Variant("gammaray-adaptive", {}),
    Variant("gammaray-suffix", {"drafter": "suffix"}),
)
"""What is measured besides gamma 0: all drafters together, with the task's prediction, and single ones."""


class TracedStack(Stack):
    """A Stack that afterwards reads the times at the server from the session's trace."""

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion.

        Raises:
            GammarayError: The completion failed.
        """
        called = time.time()
        sample = await super().sample(ask)
        deadline = time.monotonic() + _TRACE_TIMEOUT_S
        # Records are written in the background; the last ones may come after the completion.
        while time.monotonic() < deadline:
            cycles = await self._client.session_trace(sample.session_id)
            if sum(cycle.emitted for cycle in cycles) >= len(sample.token_ids):
                return with_server_times(sample, cycles, called)
            await asyncio.sleep(_POLL_S)
        return sample


def with_server_times(sample: Sample, cycles: Sequence[CycleRecord], called: float) -> Sample:
    """Return a sample with its times at the server.

    Args:
        sample: As seen by the client.
        cycles: Its cycles, in order; the clocks of client and orchestrator are the same.
        called: Unix time of the client's call.
    """
    start = cycles[0].base_position + sample.arrivals[0][1]
    first = [cycle for cycle in cycles if cycle.base_position < start]
    later = cycles[len(first) :]
    completed = min(first[-1].start_s + first[-1].total_s - called, sample.arrivals[0][0])
    target_s = sum(cycle.target.compute_s for cycle in later if cycle.target is not None)
    return replace(sample, decode_s=sample.arrivals[-1][0] - completed, target_s=target_s)


@asynccontextmanager
async def running_stack(
    target: str,
    draft: str | None,
    head: str | None = None,
    weights: str = "auto",
    timeout_s: float = START_TIMEOUT_S,
) -> AsyncIterator[AsyncClient]:
    """Run `gammaray up` until the block ends, without draft workers if `draft` is None; yield its client.

    Args:
        target: Directory or hub name, or "demo".
        draft: Likewise.
        head: A head in the target worker.
        weights: Of the draft or head: auto, int8 or int4.
        timeout_s: Longest wait for the workers' models.

    Raises:
        ClusterError: It did not start, or did not end all of its processes.
        DeadlineExceededError: A worker did not come up within two minutes.
    """
    pair = ("--draft-weights", weights, *(("--draft", draft) if draft else ("--draft-workers", "0")))
    if head:
        pair = (*pair, "--head", head)
    roles = ("target", "draft") if draft else ("target",)
    async with (
        running_cluster("--target", target, *pair, timeout_s=timeout_s) as cluster,
        AsyncClient(cluster.grpc_address) as client,
    ):
        await client.wait_ready(_WORKERS_TIMEOUT_S, roles=roles)
        yield client
