"""The systems that are compared, behind one method: gammaray through its whole stack, and the peers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.baselines import Baselines
from gammaray import AsyncClient
from gammaray.errors import InternalError
from gammaray.types import Chunk, SpeculationSummary

__all__ = ["Ask", "Peer", "Sample", "Stack", "System", "stack_name"]

Gamma = int | Literal["adaptive"]


@dataclass(frozen=True)
class Ask:
    """One completion asked for; every system goes on past end-of-sequence tokens."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """One completion and its time, as the caller of the system sees it; no summary from peers."""

    token_ids: tuple[int, ...]
    seconds: float
    first_token_s: float | None = None
    summary: SpeculationSummary | None = None


class System(Protocol):
    """Something that generates."""

    name: str

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion."""
        ...


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


class Stack:
    """gammaray: client, gRPC proxy, orchestrator, Redis, workers; one gamma policy."""

    def __init__(self, gamma: Gamma, client: AsyncClient) -> None:
        self.name = stack_name(gamma)
        self._gamma = gamma
        self._client = client

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its time runs from the call to the last chunk.

        Raises:
            GammarayError: The completion failed.
        """
        token_ids: list[int] = []
        first: float | None = None
        last: Chunk | None = None
        started = time.perf_counter()
        async for last in self._client.generate(
            ask.prompt,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            gamma=self._gamma,
            ignore_eos=True,
        ):
            token_ids += [token.token_id for token in last.tokens]
            if first is None:
                first = time.perf_counter() - started
        seconds = time.perf_counter() - started
        if last is None or last.summary is None:
            raise InternalError("the stream ended without a summary")
        return Sample(tuple(token_ids), seconds, first, last.summary)


def stack_name(gamma: Gamma) -> str:
    """Return the name under which a gamma policy stands in results."""
    return f"gammaray-{gamma}"
