"""Retained caches of ended sessions save computation, change no token, and serve their tenant only."""

import dataclasses
import itertools
from contextlib import aclosing

import pytest

from gammaray.errors import NotFoundError
from gammaray.types import GenerationRequest, SamplingParams
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.workers.prefix_affinity import prefix_keys
from tests.support.workers.service_helpers import first_tokens, rest_of, running, tokens_of, worker_process

pytestmark = pytest.mark.integration

ALICE, BOB = Caller("alice"), Caller("bob")
_numbers = itertools.count()


def request_of(**fields) -> GenerationRequest:
    """A request whose prompt no other test has had, of some hundred tokens."""
    lines = [f"def area_{next(_numbers)}(width, height):"]
    lines += [f"    total_{index} = width * {index} + height" for index in range(8)]
    fields = {"prompt": "\n".join(lines), "max_tokens": 24, "ignore_eos": True, **fields}
    return GenerationRequest(sampling=SamplingParams(temperature=1.0, seed=7), **fields)


async def ask(orchestrator, request, caller=ANONYMOUS):
    chunks = [chunk async for chunk in orchestrator.generate(request, caller)]
    return tokens_of(chunks), chunks[-1].usage


async def test_a_conversation_computes_only_new_tokens(orchestrator):
    request = request_of()
    answer, usage = await ask(orchestrator, request)
    prompt = tuple(orchestrator.tokenizer.encode(request.prompt))
    longer = dataclasses.replace(
        request, prompt=(*prompt, *answer, *orchestrator.tokenizer.encode("\n\n\nimport os"))
    )
    tokens, after = await ask(orchestrator, longer)
    # The last token that was emitted was never fed.
    assert usage.prompt_tokens + 23 <= after.cached_tokens < after.prompt_tokens
    salted, nothing = await ask(orchestrator, dataclasses.replace(longer, cache_salt="apart"))
    assert salted == tokens
    assert nothing.cached_tokens == 0


async def test_caches_are_not_shared_between_tenants(orchestrator):
    request = request_of()
    await ask(orchestrator, request, ALICE)
    assert (await ask(orchestrator, request, BOB))[1].cached_tokens == 0
    assert (await ask(orchestrator, request))[1].cached_tokens == 0
    assert (await ask(orchestrator, request, ALICE))[1].cached_tokens > 60


async def test_a_deleted_session_leaves_no_cache(orchestrator):
    request = request_of(session_id="secret")
    await ask(orchestrator, request, ALICE)
    assert await orchestrator.sessions.delete("secret", ALICE)
    other = dataclasses.replace(request, session_id="")
    assert (await ask(orchestrator, other, ALICE))[1].cached_tokens == 0


async def test_a_session_deleted_while_running_leaves_no_cache(orchestrator):
    request = request_of(session_id="soon-gone", max_tokens=1500)
    stream = orchestrator.generate(request, ALICE)
    async with aclosing(stream):
        await first_tokens(stream)
        assert await orchestrator.sessions.delete("soon-gone", ALICE)
        # What a worker does that was fed again before the owner heard of it.
        with pytest.raises(NotFoundError):
            await rest_of(stream)
    other = dataclasses.replace(request, session_id="", max_tokens=4)
    assert (await ask(orchestrator, other, ALICE))[1].cached_tokens == 0


async def test_the_next_turn_computes_only_new_tokens(orchestrator):
    first = request_of(session_id="turns")
    _, usage = await ask(orchestrator, first, BOB)
    second = dataclasses.replace(first, prompt="\n\n\nimport os", turn=1)
    assert (await ask(orchestrator, second, BOB))[1].cached_tokens >= usage.prompt_tokens + 23


async def test_prefix_caching_can_be_disabled(redis_server, workers):
    request = request_of()
    async with running(redis_server, *workers, prefix_caching=False) as orchestrator:
        first, _ = await ask(orchestrator, request)
        again, usage = await ask(orchestrator, request)
    assert again == first
    assert usage.cached_tokens == 0


@pytest.mark.nightly
@pytest.mark.slow
async def test_the_next_request_goes_to_the_worker_that_has_its_prompt(redis_server, workers):
    target, draft = workers
    with worker_process("target") as (_, other):
        async with running(redis_server, f"{target},{other}", draft) as orchestrator:
            request = request_of()
            await ask(orchestrator, request)
            keys = prefix_keys(orchestrator.tokenizer.encode(request.prompt), ":")  # no tenant, no salt
            (used,) = [
                link for link in orchestrator.fleet.targets.links.values() if link.prefixes.count(keys)
            ]
            # By sessions alone the other one would be asked, which has not read it.
            used.sessions |= {"one more", "another"}
            _, usage = await ask(orchestrator, request)
            assert usage.cached_tokens > 60
