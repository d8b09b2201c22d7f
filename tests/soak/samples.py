"""Requests with a fixed seed, and their completions at the start of the run."""

from dataclasses import dataclass

import httpx

from gammaray import AsyncClient
from tests.chaos.load import PROMPTS, Ask, Said, reference

LENGTHS = (8, 48, 160, 400)
LONG_PROMPT = "".join(f"def f{i}(value, other={i}):\n    return value + {i}\n\n" for i in range(60))
"""Several chunks of a prefill."""

TURNS = ("def area(width, height):\n", "\n\nclass Shape:\n", "\n    def name(self):\n")
CHATS = ("Write a loop.", "What is a tuple?")


class SampleError(Exception):
    """A completion differs from the expected one."""


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


def authorised(key: str | None) -> dict[str, str]:
    """Return the headers of a request with an API key."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def first_said(grpc: str, http: str, key: str | None = None) -> Expected:
    completions = await reference(grpc, samples(), key)
    async with (
        AsyncClient(grpc, api_key=key) as client,
        httpx.AsyncClient(base_url=http, timeout=120, headers=authorised(key)) as web,
    ):
        chats = {(text, t): await chat(web, text, t) for text in CHATS for t in (0.0, 1.0)}
        talks = {t: await turns(client, t, f"soak-first-{t:g}") for t in (0.0, 1.0)}
    return Expected(completions, chats, talks)


def chat_body(text: str, temperature: float) -> dict[str, object]:
    messages = [{"role": "system", "content": "Answer in Python."}, {"role": "user", "content": text}]
    return {
        "messages": messages,
        "temperature": temperature,
        "seed": 7,
        "max_completion_tokens": 60,
        "ignore_eos": True,
    }


async def chat(http: httpx.AsyncClient, text: str, temperature: float) -> str:
    answer = await http.post("/v1/chat/completions", json=chat_body(text, temperature))
    if answer.status_code != 200:
        raise SampleError(f"chat: {answer.status_code} {answer.text[:300]}")
    return str(answer.json()["choices"][0]["message"]["content"])


async def turns(client: AsyncClient, temperature: float, session_id: str) -> list[tuple[int, ...]]:
    found = []
    for turn, prompt in enumerate(TURNS):
        said = await client.complete(
            prompt,
            session_id=session_id,
            turn=turn,
            temperature=temperature,
            seed=30 + turn,
            max_tokens=40,
            ignore_eos=True,
        )
        found.append(tuple(token.token_id for token in said.tokens))
    return found
