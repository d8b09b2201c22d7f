"""Requests with a fixed seed, and their completions at the start of the run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from gammaray import AsyncClient
from tests.chaos.load import PROMPTS, Ask, Said, reference

LENGTHS = (8, 48, 160, 400)
LONG_PROMPT = "".join(f"def f{i}(value, other={i}):\n    return value + {i}\n\n" for i in range(60))
"""Several chunks of a prefill."""

TURNS = ("def area(width, height):\n", "\n\nclass Shape:\n", "\n    def name(self):\n")
CHATS = ("Write a loop.", "What is a tuple?")
ACTION_TIMEOUT_S = 120.0


class SampleError(Exception):
    """A completion differs from the expected one."""


@dataclass(frozen=True)
class Apis:
    """The two APIs of a cluster: an address, a URL and the API key, if it has keys."""

    grpc: str
    http: str
    key: str | None = None

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[AsyncClient, httpx.AsyncClient]]:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        async with (
            AsyncClient(self.grpc, api_key=self.key) as client,
            httpx.AsyncClient(base_url=self.http, timeout=ACTION_TIMEOUT_S, headers=headers) as web,
        ):
            yield client, web


@dataclass(frozen=True)
class Expected:
    """Expected results, from an undisturbed cluster."""

    completions: dict[Ask, Said]
    chats: dict[tuple[str, float], str]
    turns: dict[float, list[tuple[int, ...]]]


def samples() -> list[Ask]:
    """Return the samples: greedy and sampled, short and long, one prompt in eight a long one."""
    found = []
    for number in range(24):
        prompt = LONG_PROMPT if number % 8 == 5 else PROMPTS[number % len(PROMPTS)]
        # Not in step with the temperatures: each length has both.
        length = LENGTHS[(number // 2 + number // 8) % len(LENGTHS)]
        found.append(Ask(prompt, float(number % 2), 2000 + number, length))
    return found


async def first_said(apis: Apis) -> Expected:
    completions = await reference(apis.grpc, samples(), apis.key)
    async with apis.clients() as (client, web):
        chats = {(text, t): await chat(web, text, t) for text in CHATS for t in (0.0, 1.0)}
        talks = {t: await turns(client, t, f"soak-first-{t:g}") for t in (0.0, 1.0)}
    return Expected(completions, chats, talks)


async def chat(http: httpx.AsyncClient, text: str, temperature: float) -> str:
    messages = [{"role": "system", "content": "Answer in Python."}, {"role": "user", "content": text}]
    options = {"temperature": temperature, "seed": 7, "max_completion_tokens": 60, "ignore_eos": True}
    answer = await http.post("/v1/chat/completions", json={"messages": messages, **options})
    if answer.status_code != 200:
        raise SampleError(f"chat: {answer.status_code} {answer.text[:300]}")
    return str(answer.json()["choices"][0]["message"]["content"])


async def turns(client: AsyncClient, temperature: float, session_id: str) -> list[tuple[int, ...]]:
    found = []
    for turn, prompt in enumerate(TURNS):
        options = {"temperature": temperature, "seed": 30 + turn, "max_tokens": 40, "ignore_eos": True}
        said = await client.complete(prompt, session_id=session_id, turn=turn, **options)
        found.append(tuple(token.token_id for token in said.tokens))
    return found
