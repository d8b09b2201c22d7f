"""gammaray's cluster in a comparison: its requests, and the times of a completion at the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from gammaray import AsyncClient
from gammaray.bench.systems import Ask, Sample, Stack
from gammaray.client.request import GenerateOptions
from gammaray.wire.cycles import CycleRecord

_TRACE_TIMEOUT_S = 5.0
_POLL_S = 0.02


VARIANTS: dict[str, GenerateOptions] = {"gammaray-adaptive": {}, "gammaray-suffix": {"drafter": "suffix"}}
"""What is measured besides gamma 0, with the options of each request: all drafters together, with the task's
prediction, and single ones. Gamma is adaptive unless the options name one."""

SINGLE: dict[str, GenerateOptions] = {
    "gammaray-model": {"drafter": "model"},
    "gammaray-head": {"drafter": "head"},
}
"""As `VARIANTS`, where a cluster has both drafters."""


class TracedStack(Stack):
    """A Stack that afterwards reads the times at the server from the session's trace."""

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion.

        Raises:
            GammarayError: The completion failed.
        """
        called = time.time()
        sample = await super().sample(ask)
        cycles = await cycles_of(self._client, sample)
        return with_server_times(sample, cycles, called) if cycles else sample


async def cycles_of(client: AsyncClient, sample: Sample) -> Sequence[CycleRecord]:
    """Return the cycles of a completion, in order; none if they are not all there within some seconds."""
    deadline = time.monotonic() + _TRACE_TIMEOUT_S
    # Records are written in the background; the last ones may come after the completion.
    while time.monotonic() < deadline:
        cycles = await client.session_trace(sample.session_id)
        if sum(cycle.emitted for cycle in cycles) >= len(sample.token_ids):
            return cycles
        await asyncio.sleep(_POLL_S)
    return ()


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
