"""Log-probabilities of prompts are those of the model's plain forward, however it is cached and batched."""

import asyncio

import pytest
import torch

from gammaray.types import SamplingParams
from gammaray.v1 import types_pb2 as types
from tests.support.engine_helpers import plain_logits, plain_model, random_tokens, tiny_model
from tests.support.workers.workers_helpers import (
    ANSWER_TIMEOUT_S,
    Driver,
    running,
    spec_message,
    verify_block,
)

pytestmark = pytest.mark.integration

LONG = random_tokens(200, seed=5)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp("target"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def plain(model):
    return plain_model(model)


def scored_block(tokens, proposal=(), num_top=3, prompt_length=None, **fields):
    spec = spec_message(
        fields.pop("params", SamplingParams(temperature=0.0, seed=1)),
        prompt_length=prompt_length or len(tokens),
        cache_salt=fields.pop("cache_salt", None),
    )
    return verify_block(tokens, proposal, num_prompt_logprobs=num_top, spec=spec, **fields)


def check(prompt_logprobs, plain, prompt, num_top=3):
    """Compare with the model's own forward over the whole prompt."""
    expected = plain_logits(plain, prompt).double().log_softmax(-1)[: len(prompt) - 1]
    own = expected.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    got = torch.tensor(list(prompt_logprobs.logprobs), dtype=torch.float64)
    torch.testing.assert_close(got, own, atol=2e-5, rtol=0)
    assert prompt_logprobs.num_top == num_top
    top = torch.tensor(list(prompt_logprobs.top_logprobs), dtype=torch.float64).reshape(
        len(prompt) - 1, num_top
    )
    torch.testing.assert_close(top, expected.topk(num_top).values, atol=2e-5, rtol=0)
    ids = torch.tensor(list(prompt_logprobs.top_token_ids), dtype=torch.int64).reshape(
        len(prompt) - 1, num_top
    )
    torch.testing.assert_close(expected.gather(1, ids), top, atol=2e-5, rtol=0)
    for rank, row, value in zip(prompt_logprobs.ranks, expected, own, strict=True):
        # Near ties may be ordered the other way by rounding.
        assert (row > value + 1e-4).sum() < rank <= (row > value - 1e-4).sum() + 1


@pytest.mark.parametrize("chunk", [16, 64, 512])
async def test_prompt_logprobs_are_the_plain_forward_in_chunks_of_any_size(model, plain, chunk):
    async with running("target", model, max_batch_tokens=4 * chunk) as (link, _):
        for proposal in ((), [5, 6, 7], types.Proposal(token_ids=[4, 5, 6], parents=[-1, -1, 1])):
            await link.release("s")
            verdict = (await link.ask(scored_block(LONG, proposal))).verdict
            check(verdict.prompt_logprobs, plain, LONG)
            plainly = (await link.ask(verify_block(LONG, proposal, session_id="other"))).verdict
            assert not plainly.HasField("prompt_logprobs")
            assert verdict.next_token_id == plainly.next_token_id
            await link.release("other")


async def test_prompt_logprobs_do_not_depend_on_the_cache(model, plain):
    async with running("target", model) as (link, _):
        await link.ask(verify_block(LONG, session_id="a", spec=spec_message(cache_salt="x")))
        shared = await link.ask(verify_block(LONG, session_id="b", spec=spec_message(cache_salt="x")))
        assert shared.timing.cached_tokens > 0
        found = await link.ask(scored_block(LONG, session_id="c", cache_salt="x"))
        assert found.timing.cached_tokens == 0
        check(found.verdict.prompt_logprobs, plain, LONG)
        again = await link.ask(scored_block(LONG, session_id="c", cache_salt="x"))  # its own cache
        assert again.verdict.prompt_logprobs == found.verdict.prompt_logprobs
        after = await link.ask(verify_block(LONG, session_id="d", spec=spec_message(cache_salt="x")))
        assert after.timing.cached_tokens > 0
        assert after.verdict.next_token_id == found.verdict.next_token_id


async def test_prompts_scored_together_with_other_sessions_are_each_their_own(model, plain):
    prompts = {f"p{n}": random_tokens(20 + 37 * n, seed=n) for n in range(5)}
    async with running("target", model, max_batch_tokens=128) as (link, _):
        driver = Driver(link, None, LONG, session_id="steady")
        blocks = [scored_block(prompt, session_id=name) for name, prompt in prompts.items()]
        futures = await link.send(blocks)
        emitted = await driver.generate(10)
        answers = await asyncio.wait_for(asyncio.gather(*futures), ANSWER_TIMEOUT_S)
        for answer, prompt in zip(answers, prompts.values(), strict=True):
            check(answer.verdict.prompt_logprobs, plain, prompt)
        await link.release("steady")
        assert await Driver(link, None, LONG, session_id="alone").generate(10) == emitted


async def test_prompt_logprobs_are_of_the_raw_model_and_of_the_prompt_alone(model, plain):
    params = SamplingParams(temperature=0.7, top_k=2, seed=3, logit_bias={7: 50.0}, repetition_penalty=1.5)
    async with running("target", model) as (link, _):
        block = scored_block(LONG, params=params, prompt_length=50)
        check((await link.ask(block)).verdict.prompt_logprobs, plain, LONG[:50])


@pytest.mark.parametrize("num_top", [0, 20])
async def test_prompt_logprobs_have_as_many_alternatives_as_asked_for(model, plain, num_top):
    async with running("target", model) as (link, _):
        check(
            (await link.ask(scored_block(LONG, num_top=num_top))).verdict.prompt_logprobs,
            plain,
            LONG,
            num_top,
        )
        single = (await link.ask(scored_block(LONG[:1], num_top=num_top, session_id="one"))).verdict
        assert single.HasField("prompt_logprobs")
        assert not single.prompt_logprobs.logprobs
