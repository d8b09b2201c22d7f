"""The target worker over its real stream: verdicts, caches, fencing, batching, and scores of prompts."""

import asyncio

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from gammaray.v1 import types_pb2 as types
from tests.support.engine_helpers import plain_logits, plain_model, random_tokens, tiny_model
from tests.support.workers.held_engine import HeldEngine, all_read
from tests.support.workers.scripted_workers import until
from tests.support.workers.workers_helpers import (
    ANSWER_TIMEOUT_S,
    Driver,
    Link,
    running,
    spec_message,
    verify_block,
)

pytestmark = pytest.mark.integration

PROMPT = random_tokens(12, seed=3)
RESOURCE_EXHAUSTED, CANCELLED = 8, 1


@pytest.fixture(scope="module")
def reference(model):
    plain = plain_model(model)
    output = plain.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(PROMPT) :].tolist()


@pytest.fixture
async def target(model):
    async with running("target", model) as (link, _):
        yield link


def emitted(result):
    assert not result.verdict.accepted_path
    return [result.verdict.next_token_id]


async def test_gamma_0_loop_equals_transformers_greedy(target, reference):
    driver = Driver(target, None, PROMPT)
    assert await driver.generate(40) == reference
    assert driver.num_needs == 0


async def test_verify_tree_walks_to_the_right_leaf(target, reference):
    right, other = reference[:3], [(token + 1) % 97 for token in reference[:3]]
    tree = types.Proposal(
        token_ids=[other[0], right[0], other[1], right[1], right[2]], parents=[-1, -1, 1, 1, 3]
    )
    result = await target.ask(verify_block(PROMPT, tree))
    assert list(result.verdict.accepted_path) == [1, 3, 4]
    assert result.verdict.next_token_id == reference[3]
    follow = verify_block(PROMPT + reference[:4], context=types.TokenSpan(start=15, token_ids=reference[3:4]))
    assert emitted(await target.ask(follow)) == reference[4:5]


@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_same_block_again_gives_the_same_answer(target, method):
    params = SamplingParams(temperature=1.0, seed=11)
    distribution = types.SparseDistribution(token_ids=[4, 9], weights=[1, 3], weight_bits=2)
    proposal = types.Proposal(token_ids=[9, 4, 9])
    if method.uses_draft_distributions:
        proposal.draft_distributions.extend([distribution] * 3)
    block = verify_block(PROMPT, proposal, spec=spec_message(params, method))
    first = await target.ask(block)
    again = await target.ask(block)
    both = await target.ask(block, type(block).FromString(block.SerializeToString()))
    assert first.WhichOneof("outcome") == "verdict"
    assert {r.verdict.SerializeToString() for r in (first, again, *both)} == {
        first.verdict.SerializeToString()
    }


async def test_logprobs_are_the_raw_log_softmax_whatever_the_processing(target, model, reference):
    params = SamplingParams(temperature=0.0, seed=1, banned_token_ids=(reference[0],))
    block = verify_block(PROMPT, reference[:1], spec=spec_message(params), num_top_logprobs=3)
    verdict = (await target.ask(block)).verdict
    expected = plain_logits(plain_model(model), PROMPT)[-1].double().log_softmax(-1)
    assert len(verdict.logprobs) == 1
    assert verdict.next_token_id != reference[0]
    assert verdict.logprobs[0].logprob == pytest.approx(expected[verdict.next_token_id].item(), abs=1e-4)
    assert verdict.logprobs[0].top_token_ids[0] == reference[0]
    assert list(verdict.logprobs[0].top_logprobs) == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)


async def test_batched_sessions_get_the_results_of_single_ones(target):
    prompts = [random_tokens(5 + index % 7, seed=index) for index in range(32)]
    alone = [emitted(await target.ask(verify_block(p, session_id=f"a{i}"))) for i, p in enumerate(prompts)]
    for name in "bcd":  # a worker's first steps are small, until it knows its time per token
        answers = await target.ask(*(verify_block(p, session_id=f"{name}{i}") for i, p in enumerate(prompts)))
        assert [emitted(answer) for answer in answers] == alone
    assert max(answer.timing.batch_size for answer in answers) == 32
    assert max(target.frame_sizes) == 32


async def test_long_prefill_does_not_stall_short_verifies(model):
    async with running("target", model, max_batch_tokens=128) as (link, worker):
        long_prompt = random_tokens(900, seed=9)
        async with HeldEngine(worker) as engine:
            (slow,) = await link.send([verify_block(long_prompt, session_id="long")])
            await engine.waits()
            (short,) = await link.send([verify_block(PROMPT, session_id="short")])
            await all_read(link)
            engine.let_go()
            assert (await asyncio.wait_for(short, ANSWER_TIMEOUT_S)).timing.batch_size == 2
            answer = await asyncio.wait_for(slow, ANSWER_TIMEOUT_S)
        assert engine.forwards == [["long"], ["long", "short"], *[["long"]] * 27]
        assert emitted(answer) == [int(plain_logits(plain_model(model), long_prompt)[-1].argmax())]
        assert answer.timing.batch_size == 2
        assert answer.timing.forward_us <= answer.timing.compute_us


async def test_release_frees_the_cache_and_cancels_waiting_blocks(model):
    long_prompt = random_tokens(900, seed=1)
    async with running("target", model) as (target, worker):
        await target.ask(verify_block(PROMPT, session_id="kept"))
        await target.ask(verify_block(PROMPT, session_id="gone"))
        assert (await target.info()).num_sessions == 2
        async with HeldEngine(worker) as engine:
            (waiting,) = await target.send([verify_block(long_prompt, session_id="busy")])
            await engine.waits()
            await target.release("gone", "busy", "never-seen")
            await all_read(target)
        assert (await asyncio.wait_for(waiting, ANSWER_TIMEOUT_S)).error.code == CANCELLED
        info = await target.info()
        assert info.num_sessions == 1
        assert info.num_queued == 0
        assert 0 < info.cache_bytes <= info.cache_budget_bytes


async def test_closed_stream_drops_its_blocks_and_keeps_its_sessions(model, reference):
    async with running("target", model, max_batch_tokens=16) as (link, worker):
        await link.ask(verify_block(PROMPT))
        other = Link(worker.address, "target")
        async with HeldEngine(worker) as engine:
            (dropped,) = await other.send([verify_block(random_tokens(1000, seed=2), session_id="long")])
            await engine.waits()
            await other.close()
            await until(lambda: len(worker.streams.open_streams) == 1)
        await link.until(lambda info: info.num_queued == 0)
        assert not dropped.done()
        assert len(engine.forwards) < 5, "of more than sixty"
        follow = verify_block([*PROMPT, reference[0]])
        follow.context.CopyFrom(types.TokenSpan(start=len(PROMPT), token_ids=reference[:1]))
        follow.ClearField("spec")
        assert emitted(await link.ask(follow)) == reference[1:2]


async def test_shared_prefix_is_copied_not_computed(target):
    def block(tokens, name, salt):
        return verify_block(tokens, session_id=name, spec=spec_message(cache_salt=salt))

    prompt = random_tokens(500, seed=4)
    first = await target.ask(block(prompt, "first", "us"))
    second = await target.ask(block([*prompt, 1, 2, 3], "second", "us"))
    assert (first.timing.batch_tokens, first.timing.cached_tokens) == (500, 0)
    assert (second.timing.batch_tokens, second.timing.cached_tokens) == (3, 500)
    for name, salt in (("third", "them"), ("fourth", None)):
        other = await target.ask(block([*prompt, 1, 2, 3], name, salt))
        assert (other.timing.batch_tokens, other.timing.cached_tokens) == (503, 0)
    alone = block([*random_tokens(1, seed=99), *prompt[1:], 1, 2, 3], "fifth", "us")
    assert (await target.ask(alone)).timing.batch_tokens > 480
    await target.release("first", "second")
    ended = await target.ask(block([*prompt, 4], "sixth", "us"))
    assert (ended.timing.batch_tokens, ended.timing.cached_tokens) == (1, 500)
    assert emitted(ended) == emitted(await target.ask(block([*prompt, 4], "seventh", None)))


async def test_target_release_of_a_former_owner_is_ignored(target):
    await target.ask(verify_block(PROMPT, session_id="mine", epoch=3))
    await target.release("mine", epoch=2)
    await target.ask(verify_block(PROMPT, session_id="other", epoch=1))  # after the release
    assert (await target.info()).num_sessions == 2
    await target.release("mine", epoch=3)
    await target.until(lambda info: info.num_sessions == 1)


async def test_sessions_that_do_not_fit_together_are_served_one_after_another(model):
    prompts = [random_tokens(40, seed=seed) for seed in range(4)]
    async with running("target", model) as (target, worker):
        alone = [await target.ask(verify_block(p, session_id=f"a{i}")) for i, p in enumerate(prompts)]
        await target.release("a0", "a1", "a2", "a3")
        engine = worker.engine.scheduler.engine
        engine.budget_bytes = 3 * 64 * engine.shape.slot_bytes  # for three of them
        answers = await target.ask(*(verify_block(p, session_id=f"b{i}") for i, p in enumerate(prompts)))
        assert [answer.verdict for answer in answers] == [answer.verdict for answer in alone]
        too_long = await target.ask(verify_block(random_tokens(200, seed=1), session_id="c"))
        assert too_long.error.code == RESOURCE_EXHAUSTED
        assert (await target.ask(verify_block(prompts[0], session_id="d"))).verdict == alone[0].verdict


LONG = random_tokens(200, seed=5)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def scored_model(request, tmp_path_factory):
    return tiny_model(request.param, tmp_path_factory.mktemp("target"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def plain(scored_model):
    return plain_model(scored_model)


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
    shape = (len(prompt) - 1, num_top)
    top = torch.tensor(list(prompt_logprobs.top_logprobs), dtype=torch.float64).reshape(shape)
    torch.testing.assert_close(top, expected.topk(num_top).values, atol=2e-5, rtol=0)
    ids = torch.tensor(list(prompt_logprobs.top_token_ids), dtype=torch.int64).reshape(shape)
    torch.testing.assert_close(expected.gather(1, ids), top, atol=2e-5, rtol=0)
    for rank, row, value in zip(prompt_logprobs.ranks, expected, own, strict=True):
        # Near ties may be ordered the other way by rounding.
        assert (row > value + 1e-4).sum() < rank <= (row > value - 1e-4).sum() + 1


@pytest.mark.parametrize("chunk", [16, 64, 512])
async def test_prompt_logprobs_are_the_plain_forward_in_chunks_of_any_size(scored_model, plain, chunk):
    async with running("target", scored_model, max_batch_tokens=4 * chunk) as (link, _):
        for proposal in ((), [5, 6, 7], types.Proposal(token_ids=[4, 5, 6], parents=[-1, -1, 1])):
            await link.release("s")
            verdict = (await link.ask(scored_block(LONG, proposal))).verdict
            check(verdict.prompt_logprobs, plain, LONG)
            plainly = (await link.ask(verify_block(LONG, proposal, session_id="other"))).verdict
            assert not plainly.HasField("prompt_logprobs")
            assert verdict.next_token_id == plainly.next_token_id
            await link.release("other")


async def test_prompt_logprobs_do_not_depend_on_the_cache(scored_model, plain):
    async with running("target", scored_model) as (link, _):
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


async def test_prompts_scored_together_with_other_sessions_are_each_their_own(scored_model, plain):
    prompts = {f"p{n}": random_tokens(20 + 37 * n, seed=n) for n in range(5)}
    async with running("target", scored_model, max_batch_tokens=128) as (link, _):
        driver = Driver(link, None, LONG, session_id="steady")
        blocks = [scored_block(prompt, session_id=name) for name, prompt in prompts.items()]
        futures = await link.send(blocks)
        emitted = await driver.generate(10)
        answers = await asyncio.wait_for(asyncio.gather(*futures), ANSWER_TIMEOUT_S)
        for answer, prompt in zip(answers, prompts.values(), strict=True):
            check(answer.verdict.prompt_logprobs, plain, prompt)
        await link.release("steady")
        assert await Driver(link, None, LONG, session_id="alone").generate(10) == emitted


async def test_prompt_logprobs_are_of_the_raw_model_and_of_the_prompt_alone(scored_model, plain):
    params = SamplingParams(temperature=0.7, top_k=2, seed=3, logit_bias={7: 50.0}, repetition_penalty=1.5)
    async with running("target", scored_model) as (link, _):
        block = scored_block(LONG, params=params, prompt_length=50)
        check((await link.ask(block)).verdict.prompt_logprobs, plain, LONG[:50])


@pytest.mark.parametrize("num_top", [0, 20])
async def test_prompt_logprobs_have_as_many_alternatives_as_asked_for(scored_model, plain, num_top):
    async with running("target", scored_model) as (link, _):
        verdict = (await link.ask(scored_block(LONG, num_top=num_top))).verdict
        check(verdict.prompt_logprobs, plain, LONG, num_top)
        single = (await link.ask(scored_block(LONG[:1], num_top=num_top, session_id="one"))).verdict
        assert single.HasField("prompt_logprobs")
        assert not single.prompt_logprobs.logprobs


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(seed=11)])
async def test_conditional_block_is_served_after_the_expected_verdict_only(target, params):
    spec = spec_message(params)
    (first,) = emitted(await target.ask(verify_block(PROMPT, spec=spec)))
    (second,) = emitted(await target.ask(verify_block([*PROMPT, first], spec=spec)))
    proposal = types.Proposal(token_ids=[second])
    expected = await target.ask(verify_block([*PROMPT, first], proposal, spec=spec))
    await target.release("s")

    def after(token):
        context = types.TokenSpan(start=12, token_ids=[token])
        block = verify_block([*PROMPT, token], proposal, context=context, is_conditional=True)
        block.ClearField("spec")
        return block

    blocks = [verify_block(PROMPT, spec=spec), after((first + 1) % 97), after(first), after(first)]
    now, other, served, again = await target.ask(*blocks)
    assert emitted(now) == [first]
    assert served.verdict == expected.verdict
    for refused in (other, again):  # the last one comes after a further verdict
        assert refused.need.position == 12
