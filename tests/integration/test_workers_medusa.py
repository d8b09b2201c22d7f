"""Medusa heads in the target worker: the tokens of gamma 0, and head k is that of depth k + 1."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_workers_head import COUNT, PROMPT, Headed, headed, params, plain

from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal, VerificationMethod
from gammaray.v1 import target_service_pb2 as pb
from services.engine.core.errors import UnsupportedModelError
from services.target.medusa import MedusaDrafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.medusa_helpers import (
    HEADS,
    cyclic_heads,
    cyclic_target,
    random_heads,
    write_own,
    write_vllm,
)
from tests.support.workers.workers_helpers import running

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FEWEST = 1 + -(-(COUNT - 1) // (HEADS + 1))


@pytest.fixture(scope="module")
def random_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_model("llama", folder, seed=3)
    weights = random_heads(target)
    ids = torch.arange(0, 97, 2)
    reduced = write_vllm(folder / "vllm", weights | {"token_map": ids}, truncated_vocab_size=len(ids))
    return target, {"own": write_own(folder / "own", weights), "vllm": reduced}


@pytest.fixture(scope="module")
def exact_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exact")
    target = cyclic_target(folder / "target")
    return target, cyclic_heads(folder / "heads", target)


@pytest.mark.parametrize("kind", ["own", "vllm"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_gamma_0(random_pair, kind, temperature):
    target, heads = random_pair
    made = params(temperature)
    async with running("target", target, head=str(heads[kind]), deterministic=True) as (link, _):
        expected = await plain(link, made)
        for options in ({}, {"gamma": 1}, {"max_nodes": 12}, {"gamma": 2, "max_nodes": 30}, {"every": 3}):
            one = headed(link, made, **options)
            assert await one.generate(COUNT) == expected, options
            assert one.drafted > one.cycles / 4


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("shape", [{}, {"max_nodes": 10}])
async def test_exact_heads_are_accepted_in_every_cycle_but_the_first(exact_pair, temperature, shape):
    """Proposals of more tokens than there are heads are as long as there are heads."""
    target, heads = exact_pair
    made = params(temperature)
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, made, gamma=8, **shape)
        assert await one.generate(COUNT) == await plain(link, made)
        assert one.cycles == FEWEST


@pytest.mark.parametrize("late", [-1, 1])
async def test_heads_of_another_depth_are_refused_by_the_target(exact_pair, tmp_path, late):
    """Head 0 read as that of the next token, or of the one after depth 1, is never right."""
    target, _ = exact_pair
    heads = cyclic_heads(tmp_path, target, late=late)
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, params(0.0))
        assert await one.generate(COUNT) == await plain(link, params(0.0))
        assert one.accepted == 0
        assert one.drafted > COUNT


async def test_state_of_another_position_is_caught(exact_pair, monkeypatch):
    target, heads = exact_pair
    take = MedusaDrafter.take
    monkeypatch.setattr(
        MedusaDrafter, "take", lambda self, name, start, states: take(self, name, start, states.roll(1, 0))
    )
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, params(0.0))
        assert await one.generate(COUNT) == await plain(link, params(0.0))
        assert one.cycles > FEWEST + 5  # of a single state, as after no accepted token, none is wrong


@pytest.mark.parametrize(
    "method", [VerificationMethod.REJECTION, VerificationMethod.BLOCK, VerificationMethod.NAIVE]
)
async def test_other_methods_accept_exact_heads(exact_pair, method):
    target, heads = exact_pair
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, params(0.5), method=method)
        await one.generate(COUNT)
        assert one.cycles == FEWEST


async def test_penalties_and_masks_apply_to_the_heads(exact_pair):
    target, heads = exact_pair
    made = params(0.8, repetition_penalty=1.4, frequency_penalty=0.5, banned_token_ids=(1, 2, 3))
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, made)
        assert await one.generate(COUNT) == await plain(link, made)
        assert one.accepted > COUNT / 4


async def test_many_sessions_draft_in_one_batch(exact_pair):
    target, heads = exact_pair
    async with running("target", target, head=str(heads)) as (link, _):
        many = [headed(link, params(1.0), gamma=1 + number % 5) for number in range(12)]
        expected = await plain(link, params(1.0))
        for made in await asyncio.gather(*(one.generate(COUNT) for one in many)):
            assert made == expected


async def test_repeated_changed_and_resumed_blocks(exact_pair):
    target, heads = exact_pair
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, params(0.0))
        await one.generate(12)
        block = one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3))
        first, again = await link.ask(block), await link.ask(block)
        assert first.drafted == again.drafted
        assert len(first.drafted.token_ids) == HEADS
        assert first.verdict == again.verdict
        one.tokens[-3:] = [7, 8, 9]  # another continuation, as after a takeover
        for accepted in ([], [0, 1, 2]):  # the state before the last token is of another text at first
            result = await link.ask(one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3)))
            assert list(result.verdict.accepted_path) == accepted
            one.tokens += [result.drafted.token_ids[node] for node in result.verdict.accepted_path]
            one.tokens.append(result.verdict.next_token_id)
        await link.release(one.session_id)
        one.held.clear()  # a new owner sends everything
        assert await one.run_cycle() is not None


async def test_long_prompts_are_read_in_chunks(exact_pair):
    target, heads = exact_pair
    async with running("target", target, head=str(heads), max_batch_tokens=64) as (link, _):
        one = Headed(link, None, random_tokens(180, seed=9), params(0.0), gamma=4, session_id="long")
        await one.generate(30)
        assert one.cycles == 1 + -(-29 // (HEADS + 1))


async def test_end_of_the_context_is_reached(exact_pair):
    target, heads = exact_pair
    async with running("target", target, head=str(heads)) as (link, _):
        one = headed(link, params(0.0))
        assert len(await one.generate(256 - len(PROMPT))) == 256 - len(PROMPT)


async def test_proposals_depend_on_the_committed_tokens_only(random_pair):
    target, heads = random_pair
    async with running("target", target, head=str(heads["own"]), deterministic=True) as (link, _):
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
                await fresh.verify(Proposal())
                assert fresh.tokens == before
                assert await fresh.run_cycle() == proposal, (every, number)


async def test_heads_that_do_not_fit_stop_the_start(random_pair, exact_pair, tmp_path):
    (target, heads), (other, _) = random_pair, exact_pair
    for options, error, reason in (
        ({"head": str(write_own(tmp_path, {}, mixer=1))}, UnsupportedModelError, "'mixer' is not known"),
        ({"head": str(heads["vllm"]), "draft_weights": "int8"}, InvalidArgumentError, "draft_weights"),
    ):
        with pytest.raises(error, match=reason):
            async with running("target", target, **options):
                pass
    with pytest.raises(UnsupportedModelError, match="got the shape"):
        async with running("target", other, head=str(heads["own"])):
            pass
