"""gammaray's cluster in a comparison: its requests, and the times of a completion at the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gammaray.bench.systems import Ask, Sample, Stack
from gammaray.client.request import GenerateOptions
from gammaray.wire.cycles import CycleRecord

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
