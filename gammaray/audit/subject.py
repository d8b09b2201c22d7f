"""The audited server: what it can do, and what all checks use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from gammaray.audit.answers import Answer, AnswerError
from gammaray.audit.endpoint import Endpoint, RefusedError
from gammaray.audit.findings import CheckResult, Finding, Status, Undecided, not_possible
from gammaray.errors import GammarayError, InvalidArgumentError

NEUTRAL = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1,
    "repeat_penalty": 1,
    "return_tokens_as_token_ids": True,
}
"""Fields that turn a server's own defaults off, or name tokens uniquely; left out where they are refused."""

_NUM_TOP = (20, 5, 1)
_PLAIN = {"max_tokens": 1, "temperature": 0, "logprobs": None}
_MAX_PROMPT = 4096


@dataclass(frozen=True)
class Mode:
    """A way to ask for completions: whole or streamed, with one or more choices."""

    is_streamed: bool = False
    n: int = 1

    def __str__(self) -> str:
        return ("streamed" if self.is_streamed else "whole") + (f" with n {self.n}" if self.n > 1 else "")


WHOLE, STREAMED = Mode(), Mode(is_streamed=True)
MODES = (WHOLE, STREAMED, Mode(n=3), Mode(is_streamed=True, n=2))
"""The ways in which each parameter is checked."""


@dataclass
class Subject:
    server: Endpoint
    reference: Endpoint | None  # whose answers are right; of a gammaray server itself with gamma 0
    prompts: Sequence[str]
    alpha: float  # probability of a false alarm of the whole audit
    seed: int  # first seed of requests
    tell: Callable[[str], None] = lambda text: None  # called with what is being done, for a progress bar
    drafter: Endpoint | None = None  # the draft model that the server may follow too often
    is_own_reference: bool = False  # whether the reference is the audited server's plain mode
    no_logprobs: str = ""  # why there are no log-probabilities; empty if there are
    mode: Mode = WHOLE  # how `ask` asks
    findings: dict[str, Finding] = field(default_factory=dict)  # so far, by check
    so_far: CheckResult | None = None  # what a running check has found, in case it is interrupted
    absent: dict[Mode, str] = field(default_factory=dict)  # ways in which the server cannot be asked, and why
    shared: dict[str, asyncio.Future[Any]] = field(default_factory=dict)  # what checks find once for all ways

    async def close(self) -> None:
        for endpoint in (self.server, self.reference, self.drafter):
            if endpoint is not None:
                await endpoint.close()

    async def probe(self) -> None:
        """Find out what the server and the reference support; raises GammarayError if one does not answer."""
        self.no_logprobs, answer = await probe(self.server)
        await self._probe_modes()
        if self.reference is not None:
            reason, _ = await probe(self.reference)
            if reason:
                raise InvalidArgumentError(
                    "--reference", self.reference.url, f"a server with logprobs; {reason}"
                )
        elif answer.is_gammaray:
            options = {**self.server.fields.get("gammaray", {}), "gamma": 0}
            self.reference = self.server.beside(self.server.url, gammaray=options)
            self.is_own_reference = True

    async def _probe_modes(self) -> None:
        options = {**_PLAIN, "stream": True, "stream_options": {"include_usage": True}}
        if refusal := await _refusal(self.server, options):
            self.server.refused["stream_options"] = refusal
        for mode in MODES:
            try:
                await replace(self, mode=mode).ask("1, 2, 3,", **_PLAIN)
            except GammarayError as error:
                self.absent[mode] = str(error)

    async def ask(self, prompt: str, **fields: Any) -> Answer:
        """Return a completion, asked for in the way of `mode`; raises what `Endpoint.ask` does."""
        if self.mode.n > 1:
            fields["n"] = self.mode.n
        if self.mode.is_streamed:
            answer = await self.server.stream(prompt, **fields, stream_options={"include_usage": True})
        else:
            answer = await self.server.ask(prompt, **fields)
        if (count := len(answer.choices)) != self.mode.n:
            raise AnswerError("choices", f"{count} choices", f"{self.mode.n}", answer.curl)
        return answer

    def few(self, number: int) -> int:
        """Return how many of `number` requests a check makes in this way."""
        return number if self.mode == WHOLE else max(2, number // (2 + self.mode.n))

    def need_logprobs(self, minimum: int = 2) -> None:
        """Raise `Undecided` if the server does not list `minimum` alternatives per token."""
        if self.server.num_top < minimum:
            reason = self.no_logprobs or f"lists {self.server.num_top} alternatives per token"
            raise not_possible(f"needs log-probabilities of {minimum} alternatives: {reason}")

    def prompt(self, number: int) -> str:
        """Return a prompt; after the last comes the first again."""
        return self.prompts[number % len(self.prompts)]

    @property
    def has_seeds(self) -> bool:
        """Whether a seed may be expected to give the same text again."""
        return "seed" not in self.server.refused and not self.failed("seed")

    def failed(self, check: str) -> bool:
        found = self.findings.get(check)
        return found is not None and found.result.status is Status.FAILED


async def probe(server: Endpoint) -> tuple[str, Answer]:
    """Try path, neutral fields and log-probabilities; return why the last are missing, and a plain answer."""
    try:
        answer = await server.ask("1, 2, 3,", **_PLAIN)
    except RefusedError:
        server.is_chat = True
        answer = await server.ask("1, 2, 3,", **_PLAIN)
    for name, value in NEUTRAL.items():
        if await _refusal(server, {**_PLAIN, "temperature": 1, name: value}) is None:
            server.fields[name] = value
    if refusal := await _refusal(server, {**_PLAIN, "seed": 1}):
        server.refused["seed"] = refusal
    reason = ""
    for num_top in _NUM_TOP:
        refusal = await _refusal(server, {**_PLAIN, "logprobs": num_top})
        if refusal is None:
            server.num_top = num_top
            return "", answer
        reason = reason or refusal
    return reason, answer


async def _refusal(server: Endpoint, fields: dict[str, Any]) -> str | None:
    try:
        answer = await (server.stream if fields.pop("stream", False) else server.ask)("1, 2, 3,", **fields)
    except Undecided:
        raise
    except GammarayError as error:  # some servers answer 500 to an unknown field
        return str(error)
    if fields["logprobs"] and not any(token.cells for token in answer.choices[0].tokens):
        return "the server accepts `logprobs` and returns none"
    return None


def default_prompts() -> list[str]:
    text = resources.files("gammaray.audit").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["prompt"] for line in text.splitlines()]


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file, one per line: text, or JSON of a text or of an object with `prompt`."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        prompt: Any = line
        if path.suffix in (".jsonl", ".json"):
            try:
                prompt = json.loads(line)
            except (ValueError, RecursionError):
                prompt = None
            prompt = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if not isinstance(prompt, str) or not 0 < len(prompt) <= _MAX_PROMPT:
            allowed = f"a prompt of 1 to {_MAX_PROMPT} characters"
            raise InvalidArgumentError(f"--prompts: line {number}", line[:60], allowed)
        found.append(prompt)
    if not found:
        raise InvalidArgumentError("--prompts", path.name, "at least one prompt")
    return found
