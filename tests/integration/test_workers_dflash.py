"""A DFlash head in the target worker: the tokens of gamma 0, from the states of the right positions."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_workers_head import COUNT, PROMPT, Headed, headed, params, plain

from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal, VerificationMethod
from gammaray.v1 import target_service_pb2 as pb
from services.engine.core.errors import UnsupportedModelError
from services.engine.engine import SequenceInput
from services.engine.loader import load_engine
from services.heads.dflash_formats import load_dflash
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import as_official_dflash, changed, complete_dflash
from tests.support.workers.workers_helpers import running

pytestmark = [pytest.mark.integration, pytest.mark.slow]

KINDS = ("dflash", "dflash-anchor", "official")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: complete_dflash(kind, folder / kind) for kind in KINDS[:2]}
    return made | {"official": as_official_dflash(folder / "official")}


class Reference:
    """What a head drafts greedily, computed at once from the states of all positions."""

    def __init__(self, target, head):
        self._engine = load_engine(str(target), device="cpu", dtype="float32")
        self._head, self._ids = load_dflash(str(head), str(target))
        self._engine.tap(self._head.config.taps)

    def proposal(self, tokens, depth, first=0):
        """Return the chain after `tokens` of a head that knows the states from `first` on."""
        config = self._head.config
        self._engine.release("s")
        self._engine.step([SequenceInput("s", 0, tokens, 1)])
        known = torch.arange(first, len(tokens) - 1)
        with torch.inference_mode():
            context = self._head.context(self._head.fuse(self._engine.taps[0][known]), known)
            block = torch.tensor([tokens[-1], *[config.mask_token] * (config.block_size - 1)])
            places = torch.arange(len(block)) + len(tokens) - 1
            best = self._head.logits(self._head(block, places, context)).argmax(-1)
        best = best[config.first_row :][:depth]
        return (best if self._ids is None else self._ids[best]).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_gamma_0(target, heads, kind, temperature):
    made = params(temperature)
    async with running("target", target, head=str(heads[kind]), deterministic=True) as (link, _):
        expected = await plain(link, made)
        for options in ({}, {"gamma": 1}, {"max_nodes": 12}, {"gamma": 2, "max_nodes": 30}, {"every": 3}):
            one = headed(link, made, **options)
            assert await one.generate(COUNT) == expected, options
            assert one.drafted > one.cycles / 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 2, 3])
async def test_proposals_are_those_of_all_states_at_once(target, heads, kind, every):
    """Whatever was accepted, and whatever others proposed: so no state is of another position."""
    reference = Reference(target, heads[kind])
    async with running("target", target, head=str(heads[kind]), engine="transformers") as (link, _):
        one = headed(link, params(0.0), gamma=8, every=every)
        one.tokens = list(PROMPT)
        await one.verify(Proposal())
        depth = 5 if kind == "dflash-anchor" else 4
        compared = 0
        for _ in range(20):
            before = list(one.tokens)
            proposal = await one.run_cycle()
            if proposal is not None:
                assert list(proposal.token_ids) == reference.proposal(before, depth)
                compared += 1
        assert compared == len(range(every, 21, every))


async def test_accepted_proposals_are_drafted_from_too(target, heads):
    """The states of accepted tokens are those of the proposal's own rows in the target's forward."""
    reference = Reference(target, heads["dflash"])
    async with running("target", target, head=str(heads["dflash"]), engine="transformers") as (link, _):
        one = headed(link, params(0.0))
        expected = await plain(link, params(0.0))
        one.tokens = list(PROMPT)
        await one.verify(Proposal())
        for _ in range(6):
            known = len(one.tokens) - len(PROMPT)
            await one.verify(Proposal((*expected[known : known + 2], 0)))  # two are accepted
            assert len(one.tokens) - len(PROMPT) >= known + 3
            before = list(one.tokens)
            proposal = await one.run_cycle()
            assert list(proposal.token_ids) == reference.proposal(before, 4)


async def test_states_that_are_missing_are_not_seen(target, heads):
    """Behind a forward whose states nobody kept, the head begins where states are at hand."""
    reference = Reference(target, heads["dflash"])
    async with running("target", target, head=str(heads["dflash"]), engine="transformers") as (link, _):
        one = headed(link, params(0.0))
        one.tokens = list(PROMPT)
        result = await link.ask(one.block(pb.VerifyBlock, 0, with_spec=True))
        one.tokens.append(result.verdict.next_token_id)
        result = await link.ask(one.block(pb.VerifyBlock, 0, with_spec=True))
        one.tokens.append(result.verdict.next_token_id)
        first = len(one.tokens) - 1
        await one.verify(Proposal())
        before = list(one.tokens)
        proposal = await one.run_cycle()
        assert list(proposal.token_ids) == reference.proposal(before, 4, first)
        assert list(proposal.token_ids) != reference.proposal(before, 4)


@pytest.mark.parametrize(
    "method", [VerificationMethod.REJECTION, VerificationMethod.BLOCK, VerificationMethod.NAIVE]
)
async def test_other_methods_take_its_proposals(target, heads, method):
    async with running("target", target, head=str(heads["dflash"])) as (link, _):
        one = headed(link, params(0.8), method=method)
        assert len(await one.generate(COUNT)) == COUNT
        assert one.drafted > COUNT / 2


async def test_many_sessions_draft_in_one_batch(target, heads):
    async with running("target", target, head=str(heads["dflash"]), deterministic=True) as (link, _):
        many = [headed(link, params(1.0), gamma=1 + number % 5) for number in range(12)]
        expected = await plain(link, params(1.0))
        for made in await asyncio.gather(*(one.generate(COUNT) for one in many)):
            assert made == expected


async def test_repeated_and_changed_blocks_are_answered_alike(target, heads):
    reference = Reference(target, heads["dflash"])
    async with running("target", target, head=str(heads["dflash"]), engine="transformers") as (link, _):
        one = headed(link, params(0.0))
        await one.generate(12)
        block = one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3))
        first, again = await link.ask(block), await link.ask(block)
        assert first.drafted == again.drafted
        assert first.verdict == again.verdict
        one.tokens[-3:] = [7, 8, 9]  # another continuation, as after a takeover
        for _ in range(2):
            before = list(one.tokens)
            result = await link.ask(one.block(pb.VerifyBlock, 0, with_spec=True, head=pb.HeadDraft(gamma=3)))
            one.tokens += [result.drafted.token_ids[node] for node in result.verdict.accepted_path]
            one.tokens.append(result.verdict.next_token_id)
        assert list(result.drafted.token_ids) == reference.proposal(before, 3)


async def test_long_prompts_and_the_end_of_the_context(target, heads):
    async with running("target", target, head=str(heads["dflash"]), max_batch_tokens=64) as (link, _):
        one = Headed(link, None, random_tokens(100, seed=9), params(0.0), gamma=4, session_id="long")
        count = (await link.info()).max_context - 100
        assert len(await one.generate(count)) == count
        assert one.drafted > count / 2


async def test_head_that_does_not_fit_stops_the_start(target, heads, tmp_path):
    folder = changed("dflash", tmp_path, config=lambda stored: {**stored, "markov_rank": 4})
    for options, error, reason in (
        ({"head": str(folder)}, UnsupportedModelError, "'markov_rank' is not known"),
        ({"head": str(heads["dflash"]), "draft_weights": "int4"}, InvalidArgumentError, "draft_weights"),
    ):
        with pytest.raises(error, match=reason):
            async with running("target", target, **options):
                pass
