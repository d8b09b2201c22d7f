"""Load over the OpenAI API: completions, chats, disconnects, resumes."""

import random
from typing import Any

import httpx

from tests.chaos.load import PATH, Ask, Heard, Said
from tests.soak.grpc_mix import GAMMAS, check, draw
from tests.soak.samples import LENGTHS, Expected, SampleError, chat


async def complete(http: httpx.AsyncClient, expected: Expected, rng: random.Random) -> None:
    ask = draw(rng, expected)
    answer = await http.post(PATH, json=_body(ask, rng))
    if answer.status_code != 200:
        raise SampleError(f"{answer.status_code} {answer.text[:300]}")
    body = answer.json()
    check(expected, ask, Said(tuple(body["gammaray"]["token_ids"]), body["choices"][0]["text"]))


async def stream(http: httpx.AsyncClient, expected: Expected, rng: random.Random) -> None:
    ask, heard = draw(rng, expected), Heard()
    await heard.over_http(http, _body(ask, rng))
    check(expected, ask, heard.said)


async def resume(http: httpx.AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A client that loses its connection and sends the request again with its last event id."""
    ask, heard = draw(rng, expected, LENGTHS[2]), Heard()
    body = _body(ask, rng)
    await heard.over_http(http, body, count=rng.randrange(1, 6))
    await heard.over_http(http, body)
    check(expected, ask, heard.said)


async def leave(http: httpx.AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A client that disconnects after some events, or before a response that is not streamed."""
    body = _body(draw(rng, expected, LENGTHS[2]), rng)
    if rng.random() < 0.5:
        await Heard().over_http(http, body, count=rng.randrange(1, 6))
        return
    try:
        await http.post(PATH, json=body, timeout=httpx.Timeout(5.0, read=0.2))
    except httpx.ReadTimeout:
        pass


async def talk(http: httpx.AsyncClient, expected: Expected, rng: random.Random) -> None:
    text, temperature = rng.choice(list(expected.chats))
    answer = await chat(http, text, temperature)
    if answer != expected.chats[text, temperature]:
        raise SampleError(f"chat {text!r}: {answer!r} not {expected.chats[text, temperature]!r}")


def _body(ask: Ask, rng: random.Random) -> dict[str, Any]:
    return {"prompt": ask.prompt, **ask.options(), "gammaray": {"gamma": rng.choice(GAMMAS)}}


HTTP_MIX = {complete: 3, stream: 5, resume: 2, leave: 2, talk: 3}
"""How often each, in parts."""
