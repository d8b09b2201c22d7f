"""The interface of measured systems, and its implementation for gammaray's whole stack."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Protocol

from gammaray.client.async_client import AsyncClient
from gammaray.client.request import GenerateOptions
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import ADAPTIVE, Chunk, GammaPolicy, SpeculationSummary

Arrival = tuple[float, int]
"""One chunk: seconds since the call, and its number of tokens."""


@dataclass(frozen=True)
class Ask:
    """A requested completion.

    `prompt` is text, or token ids of the target's vocabulary. `prediction` is text that the completion may
    resemble; systems without predicted outputs ignore it. With `ignore_eos` every completion has `max_tokens`
    tokens, else it may end before.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    prediction: str = ""
    ignore_eos: bool = True


@dataclass(frozen=True)
class Sample:
    """One completion and its time, measured at the caller."""

    token_ids: tuple[int, ...]
    seconds: float  # from the call to the last token
    arrivals: tuple[Arrival, ...] = ()  # chunks with tokens, in order; empty for systems that do not stream
    summary: SpeculationSummary | None = None  # None for systems that do not report one
    decode_s: float | None = None  # from the first chunk's completion at the server to the last arrival
    target_s: float | None = None  # seconds that the target computed in that time
    session_id: str = ""  # empty for systems without sessions

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the call to the first chunk with a token; None for systems that do not stream."""
        return self.arrivals[0][0] if self.arrivals else None


class System(Protocol):
    """A system that generates completions."""

    name: str

    async def sample(self, ask: Ask) -> Sample: ...


class Stack:
    """gammaray: client, gRPC proxy, orchestrator, Redis, workers; one gamma policy, as for `parse_gamma`.

    Further `options` of each request replace those above; the `name` in results is that of the policy.
    """

    def __init__(
        self, gamma: int | str, client: AsyncClient, *, options: GenerateOptions | None = None, name: str = ""
    ) -> None:
        self.name = name or stack_name(gamma)
        self._policy = parse_gamma(str(gamma))
        self._client = client
        self._options: GenerateOptions = options or {}

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its time runs from the call to the last chunk."""
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        last: Chunk | None = None
        options: GenerateOptions = {
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "gamma": self._policy,
            "ignore_eos": ask.ignore_eos,
            "cache_salt": secrets.token_hex(8),  # A fresh salt prevents prefix cache hits.
        }
        if ask.prediction:
            options["prediction"] = ask.prediction
        options.update(self._options)
        started = time.perf_counter()
        async for last in self._client.generate(ask.prompt, **options):
            if last.tokens:
                arrivals.append((time.perf_counter() - started, len(last.tokens)))
                token_ids += [token.token_id for token in last.tokens]
        seconds = time.perf_counter() - started
        if last is None or last.summary is None:
            raise InternalError("the stream ended without a summary")
        return Sample(tuple(token_ids), seconds, tuple(arrivals), last.summary, session_id=last.session_id)


def parse_gamma(text: str) -> GammaPolicy:
    """Return the policy that `text` names: "4" (a chain), "4x16" (a tree, depth x nodes), or "adaptive"."""
    if text == "adaptive":
        return ADAPTIVE
    depth, separator, nodes = text.partition("x")
    try:
        policy = GammaPolicy(fixed=int(depth), max_nodes=int(nodes) if separator else 0)
    except ValueError:
        allowed = "adaptive, a depth such as 4, or depth x nodes such as 4x16"
        raise InvalidArgumentError("gamma", text, allowed) from None
    policy.validate()
    return policy


def stack_name(gamma: int | str) -> str:
    """Return the name of a gamma policy in results."""
    return f"gammaray-{gamma}"
