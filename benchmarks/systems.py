"""The peers that gammaray is compared with, as systems that answer one completion at a time."""

from __future__ import annotations

from benchmarks.baselines import Baselines
from gammaray.bench.systems import Ask, Sample

REFERENCE = "generate"
"""transformers' plain decoding."""


class Peer:
    """A system of `Baselines`, by the name it has there."""

    def __init__(self, name: str, baselines: Baselines) -> None:
        self.name = name
        self._baselines = baselines

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its times are taken in the process that generates."""
        made = await self._baselines.generate(
            self.name,
            ask.prompt,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            ignore_eos=ask.ignore_eos,
        )
        return Sample(made.token_ids, made.seconds, made.arrivals, target_s=made.target_s)
