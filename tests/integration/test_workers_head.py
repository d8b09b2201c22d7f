"""A head in the target worker: the tokens of gamma 0, drafted and verified in one call."""

import asyncio
import itertools

import pytest

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.v1 import target_service_pb2 as pb
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, bigram_head, bigram_target
from tests.support.workers.workers_helpers import Driver, Headed, running, verify_block

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUPLED, REJECTION = VerificationMethod.COUPLED, VerificationMethod.REJECTION
BLOCK, NAIVE = VerificationMethod.BLOCK, VerificationMethod.NAIVE
PROMPT = random_tokens(20, seed=3)
COUNT = 60
_numbers = itertools.count()


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module", params=["head", "draft model"])
def bigrams(request, tmp_path_factory):
    """A target, and what predicts it exactly: a head, or a draft model with the same weights."""
    folder = tmp_path_factory.mktemp("bigrams")
    target = bigram_target(folder / "target")
    return target, bigram_head(folder / "head", target) if request.param == "head" else target


@pytest.fixture
async def link(bigrams):
    target, head = bigrams
    async with running("target", target, head=str(head)) as (link, _):
        yield link


def params(temperature, **others):
    return SamplingParams(temperature=temperature, seed=4, **others)


def headed(link, made, **options):
    return Headed(link, None, PROMPT, made, session_id=f"h{next(_numbers)}", **{"gamma": 4, **options})


async def plain(link, made, count=COUNT, method=COUPLED):
    return await Driver(link, None, PROMPT, made, method, session_id=f"p{next(_numbers)}").generate(count)


@pytest.mark.parametrize("variant", ["llama", "llama-residual", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_gamma_0(random_target, variant, temperature):
    made = params(temperature)
    async with running("target", random_target, head=str(DATA / variant), deterministic=True) as (link, _):
        expected = await plain(link, made)
        for options in ({}, {"gamma": 1}, {"max_nodes": 12}, {"gamma": 2, "max_nodes": 30}, {"every": 3}):
            one = headed(link, made, **options)
            assert await one.generate(COUNT) == expected, options
            assert one.drafted > one.cycles / 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shape", [{}, {"max_nodes": 10}])
async def test_exact_head_is_accepted_in_every_cycle_but_the_first(link, temperature, shape):
    made = params(temperature)
    one = headed(link, made, **shape)
    assert await one.generate(COUNT) == await plain(link, made)
    fewest = 1 + -(-(COUNT - 1) // 5)
    # At a temperature a tree prefers a likely second choice to an unlikely deep one.
    # A draft model needs no hidden states, and drafts in the first cycle, too.
    assert fewest - 1 <= one.cycles <= fewest if not shape or temperature == 0 else one.cycles < 1.3 * fewest


@pytest.mark.parametrize("method", [REJECTION, BLOCK, NAIVE])
async def test_other_methods_accept_an_exact_head(link, method):
    one = headed(link, params(0.8), method=method)
    await one.generate(COUNT)
    accepted = one.accepted / one.drafted
    assert accepted < 1.0 if method is NAIVE else accepted == 1.0


async def test_penalties_and_masks_apply_to_the_head(link):
    made = params(0.8, repetition_penalty=1.4, frequency_penalty=0.5, banned_token_ids=(1, 2, 3))
    one = headed(link, made)
    assert await one.generate(COUNT) == await plain(link, made)
    assert one.cycles <= 1 + -(-(COUNT - 1) // 5)


async def test_many_sessions_draft_in_one_batch(link):
    many = [headed(link, params(1.0), gamma=1 + number % 5) for number in range(12)]
    expected = await plain(link, params(1.0))
    for made in await asyncio.gather(*(one.generate(COUNT) for one in many)):
        assert made == expected


async def test_released_and_resumed_sessions_draft_again(link):
    one = headed(link, params(0.0))
    await one.generate(20)
    await link.release(one.session_id)
    one.held.clear()  # a new owner sends everything
    cycles = one.cycles
    for _ in range(5):
        await one.run_cycle()
    assert one.tokens[len(PROMPT) :][:40] == (await plain(link, params(0.0)))[:40]
    assert one.cycles - cycles == 5
    assert len(one.tokens) - len(PROMPT) >= 20 + 1 + 4 * 5


async def test_repeated_and_changed_blocks_are_answered_alike(link):
    one = headed(link, params(0.0))
    await one.generate(12)
    block = one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3))
    first, again = await link.ask(block), await link.ask(block)
    assert first.drafted == again.drafted
    assert len(first.drafted.token_ids) == 3
    assert first.verdict == again.verdict
    one.tokens[-3:] = [7, 8, 9]  # another continuation, as after a takeover
    changed_block = one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3))
    other = await link.ask(changed_block)
    one.tokens += [other.drafted.token_ids[node] for node in other.verdict.accepted_path]
    one.tokens.append(other.verdict.next_token_id)
    follow = await link.ask(one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3)))
    assert list(follow.verdict.accepted_path) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["draft model", "llama", "qwen3"])
async def test_proposals_depend_on_the_committed_tokens_only(random_target, tmp_path, kind):
    """Whatever was drafted and refused, and whatever others proposed, a fresh session drafts the same."""
    head = tiny_model("llama", tmp_path, seed=8) if kind == "draft model" else DATA / kind
    async with running("target", random_target, head=str(head), deterministic=True) as (link, _):
        for every in (1, 2, 3):
            one = headed(link, params(0.0), every=every)
            one.tokens = list(PROMPT)
            await one.verify(Proposal())
            for number in range(24):
                before = list(one.tokens)
                proposal = await one.run_cycle()
                if proposal is None:
                    continue
                fresh = headed(link, params(0.0))
                fresh.tokens = before[:-1]
                await fresh.verify(Proposal())  # a head needs the hidden states of a forward
                assert fresh.tokens == before
                assert await fresh.run_cycle() == proposal, (every, number)


async def test_proposal_beside_a_draft_of_the_head_is_refused(link):
    result = await link.ask(verify_block(PROMPT, [1, 2], head=pb.HeadDraft(gamma=2)))
    assert "none where the head drafts" in result.error.message
    result = await link.ask(verify_block(PROMPT, head=pb.HeadDraft(gamma=65)))
    assert result.error.message == "gamma: got 65, allowed: 0 to 64"


async def test_worker_without_a_head_verifies_nothing(bigrams):
    target, _ = bigrams
    async with running("target", target) as (link, _):
        one = headed(link, params(0.0))
        assert await one.generate(10) == await plain(link, params(0.0), 10)
        assert (one.cycles, one.drafted) == (10, 0)
        assert (await link.info()).head == ""
