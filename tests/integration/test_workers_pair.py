"""Draft and target together: speculation changes the speed and not the tokens."""

import asyncio

import pytest

from gammaray.types import SamplingParams
from tests.support.engine_helpers import random_tokens
from tests.support.workers.workers_helpers import Driver, running, verify_block

pytestmark = pytest.mark.integration

PROMPT = (5, 17, 300, 42, 7, 11, 80, 74)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=1),
    "warm": SamplingParams(temperature=1.0, seed=2**63 + 5),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=4),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5
    ),
    "masks": SamplingParams(
        temperature=1.0, banned_token_ids=(10, 14), logit_bias={80: 3.0}, min_tokens=20, seed=6
    ),
}


async def decode(target, draft, params, gamma, name, count=40, **options):
    driver = Driver(target, draft, PROMPT, params=params, gamma=gamma, session_id=name, **options)
    return driver, await driver.generate(count)


@pytest.fixture
async def pair():
    """The demo pair, deterministic, so that equality does not depend on floating-point ties."""
    async with running("target", "demo", deterministic=True) as (target, _):
        async with running("draft", "demo") as (draft, _):
            yield target, draft


@pytest.mark.parametrize("name", PARAMS)
async def test_coupled_tokens_do_not_depend_on_gamma(pair, name):
    plain, expected = await decode(*pair, PARAMS[name], 0, "g0", eos_token_ids=(0,))
    for gamma in (3, 8):
        driver, tokens = await decode(*pair, PARAMS[name], gamma, f"g{gamma}", eos_token_ids=(0,))
        assert tokens == expected
        assert driver.accepted > 0
    assert plain.accepted == 0


async def test_eight_sessions_at_once_decode_what_each_decodes_alone(pair):
    params = [SamplingParams(temperature=1.0, seed=index) for index in range(8)]
    alone = [(await decode(*pair, p, 4, f"a{p.seed}"))[1] for p in params]
    together = await asyncio.gather(*(decode(*pair, p, 4, f"b{p.seed}") for p in params))
    assert [tokens for _, tokens in together] == alone
    assert max(pair[0].frame_sizes) > 1


async def test_end_of_sequence_inside_a_block_ends_at_the_same_place(pair):
    _, expected = await decode(*pair, PARAMS["warm"], 0, "free", count=30)
    for index in (0, 1, 2, 5, 9):
        eos = (expected[index],)
        stop = expected.index(eos[0]) + 1
        for gamma in (0, 3, 8):
            _, tokens = await decode(*pair, PARAMS["warm"], gamma, f"{index}-{gamma}", eos_token_ids=eos)
            assert tokens == expected[:stop]


async def test_sessions_that_do_not_fit_together_are_served_one_after_another(pair):
    prompts = [random_tokens(40, seed=seed, vocab_size=2048) for seed in range(4)]
    alone = [await pair[0].ask(verify_block(p, session_id=f"a{i}")) for i, p in enumerate(prompts)]
    async with running("target", "demo", deterministic=True, cache_budget_mb=5) as (target, _):
        answers = await target.ask(*(verify_block(p, session_id=f"b{i}") for i, p in enumerate(prompts)))
        assert [a.verdict for a in answers] == [a.verdict for a in alone]
        too_long = random_tokens(600, seed=1, vocab_size=2048)
        assert (await target.ask(verify_block(too_long, session_id="c"))).error.code == 8
        assert (await target.ask(verify_block(prompts[0], session_id="d"))).verdict == alone[0].verdict
