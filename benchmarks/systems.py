"""The peers that gammaray is compared with, as systems that answer one completion at a time."""

from __future__ import annotations

from benchmarks.baselines import Baselines
from gammaray.bench.systems import Ask, Sample

__all__ = ["REFERENCE", "Peer"]

REFERENCE = "generate"
"""transformers' plain decoding."""


class Peer:
    """`transformers`: `generate`, `assisted-N` or `lookup-N`."""

    def __init__(self, name: str, baselines: Baselines) -> None:
        self.name = name
        self._baselines = baselines

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its time is that of the `generate` call, in the peer's own process."""
        made = await self._baselines.generate(
            self.name, ask.prompt, max_tokens=ask.max_tokens, temperature=ask.temperature, seed=ask.seed
        )
        return Sample(made.token_ids, made.seconds)
