"""Load over gRPC: completions, turns, disconnects, resumes, cancels, look-ups."""

import random
import uuid
from contextlib import aclosing
from dataclasses import replace

from gammaray import AsyncClient, FinishReason, NotFoundError
from tests.chaos.load import Ask, Heard, Said, difference, generate
from tests.soak.samples import LENGTHS, Expected, SampleError, turns

GAMMAS = ("adaptive", "adaptive", "adaptive", 0, 2, 5, 8)
DRAFTERS = ("model", "model", "model", "suffix", "none")


def draw(rng: random.Random, expected: Expected, min_tokens: int = 0) -> Ask:
    return rng.choice([ask for ask in expected.completions if ask.max_tokens >= min_tokens])


def check(expected: Expected, ask: Ask, said: Said) -> None:
    """Compare a completion with that at the start of the run."""
    if said != expected.completions[ask]:
        raise SampleError(f"{ask}: {difference(expected.completions[ask], said)}")


async def complete(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A sample, whose tokens depend on neither gamma nor drafter."""
    ask = draw(rng, expected)
    said = await generate(client, ask, gamma=rng.choice(GAMMAS), drafter=rng.choice(DRAFTERS))
    check(expected, ask, said)


async def complete_unseeded(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A completion whose seed the server chooses: only the length is compared."""
    ask = draw(rng, expected)
    verification = rng.choice(("coupled", "rejection", "naive", "block"))
    said = await client.complete(
        ask.prompt, temperature=1.0, max_tokens=ask.max_tokens, ignore_eos=True, verification=verification
    )
    if len(said.tokens) != ask.max_tokens:
        raise SampleError(f"{len(said.tokens)} tokens of {ask.max_tokens}")


async def talk(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    temperature = rng.choice(list(expected.turns))
    said = await turns(client, temperature, uuid.uuid4().hex)
    if said != expected.turns[temperature]:
        raise SampleError(f"turns at temperature {temperature:g}: {said} not {expected.turns[temperature]}")


async def leave(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    ask = draw(rng, expected, LENGTHS[2])
    await _begin(client, ask, uuid.uuid4().hex, rng.randrange(1, 6))


async def resume(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    ask, name = draw(rng, expected, LENGTHS[2]), uuid.uuid4().hex
    heard = await _begin(client, ask, name, rng.randrange(1, 6))
    check(expected, ask, await heard.take(client.resume(name, offset=len(heard.token_ids))))


async def cancel(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A turn that another client cancels while it is streamed."""
    ask, name = draw(rng, expected, LENGTHS[3]), uuid.uuid4().hex
    token_ids, reason = tuple[int, ...](), None
    async for chunk in client.generate(ask.prompt, **ask.options(), session_id=name):
        if not token_ids:
            await client.cancel(name)
        token_ids += tuple(token.token_id for token in chunk.tokens)
        reason = chunk.finish_reason
    wanted = expected.completions[ask].token_ids
    if reason is not FinishReason.CANCELLED or token_ids != wanted[: len(token_ids)]:
        raise SampleError(f"cancelled: ended with {reason} after {len(token_ids)} tokens of {ask}")


async def look_up(client: AsyncClient, expected: Expected, rng: random.Random) -> None:
    """A session that is listed, read, traced and deleted."""
    name = uuid.uuid4().hex
    said = await client.complete("x = ", session_id=name, seed=1, max_tokens=8, ignore_eos=True)
    if name not in [info.session_id for info in await client.list_sessions(1000)]:
        raise SampleError("a session that just finished is not listed")
    _, tokens = await client.get_session(name)
    # Who drafted a token is not stored.
    if tokens != tuple(replace(token, drafter=None) for token in said.tokens):
        raise SampleError(f"the store has {tokens}, the client got {said.tokens}")
    await client.session_trace(name)
    await client.status()
    if not await client.delete_session(name):
        raise SampleError("there was nothing to delete")
    try:
        await client.get_session(name)
    except NotFoundError:
        return
    raise SampleError("a deleted session is still there")


async def _begin(client: AsyncClient, ask: Ask, name: str, num_pieces: int) -> Heard:
    heard = Heard()
    async with aclosing(client.generate(ask.prompt, **ask.options(), session_id=name)) as chunks:
        await heard.take(chunks, num_pieces)
    return heard


GRPC_MIX = {complete: 8, complete_unseeded: 3, talk: 2, leave: 2, resume: 2, cancel: 2, look_up: 2}
"""How often each, in parts."""
