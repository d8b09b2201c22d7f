"""A head on a draft worker: the target sends features, and the tokens are those of gamma 0."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from gammaray.blocks import Features
from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.wire.blocks import (
    features_from_proto,
    features_to_proto,
    proposal_from_proto,
    proposal_to_proto,
)
from services.draft import heads as draft_heads
from services.draft.heads import HeadScheduler
from services.heads.features import to_features
from services.target import features as target_features
from services.target import worker as target_worker
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.head_helpers import DATA, bigram_head, bigram_target, changed
from tests.support.workers.workers_helpers import Driver, propose_block, running

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUPLED = VerificationMethod.COUPLED
PROMPT = random_tokens(20, seed=3)
COUNT = 60
_numbers = itertools.count()


@dataclass
class Remote(Driver):
    """Relays features from the target to the draft worker; `every` other cycle someone else proposes."""

    every: int = 1
    drafted: int = 0
    cycles: int = 0
    end: int = 0
    kept: list[Features] = field(default_factory=list)
    sent: list[Features] = field(default_factory=list)

    async def generate(self, count: int) -> list[int]:
        self.tokens = list(self.prompt)
        while len(self.tokens) < len(self.prompt) + count:
            await self.run_cycle()
        return self.tokens[len(self.prompt) :][:count]

    async def run_cycle(self) -> Proposal:
        self.cycles += 1
        proposal = Proposal((5, 6)) if self.cycles % self.every else await self.propose()
        await self.verify(proposal)
        return proposal

    async def propose(self) -> Proposal:
        fields: dict[str, Any] = {"gamma": self.gamma, "max_nodes": self.max_nodes}
        if self.kept:
            self.sent.append(Features.joined(self.kept))
            fields["features"] = features_to_proto(self.sent[-1])
        result = await self._feed(self.draft, draft_pb.ProposeBlock, **fields)
        assert result.WhichOneof("outcome") == "proposal", result
        self.kept.clear()
        proposal = proposal_from_proto(result.proposal, 2**31)
        self.drafted += len(proposal)
        self.proposals.append(proposal)
        return proposal

    async def verify(self, proposal: Proposal) -> Any:
        result = await self._feed(
            self.target,
            target_pb.VerifyBlock,
            proposal=proposal_to_proto(proposal),
            features_from=self.end,
        )
        assert result.WhichOneof("outcome") == "verdict", result
        path = result.verdict.accepted_path
        self.accepted += len(path)
        if result.HasField("features"):
            found = features_from_proto(result.features, len(self.tokens) + len(path))
            assert found.start >= self.end
            if found.start > self.end:
                self.kept.clear()
            self.end = found.end
            self.kept.append(found)
        self.tokens += [proposal.token_ids[node] for node in path]
        self.tokens.append(result.verdict.next_token_id)


@asynccontextmanager
async def pair(target, head, *, draft=None, **settings):
    """Run a target worker with the features of a head, and a draft worker with the head."""
    async with (
        running("target", target, features=str(head), deterministic=True, **settings) as (verifier, _),
        running("draft", head, target_model=str(target), **(draft or {})) as (drafter, _),
    ):
        yield verifier, drafter


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("target"), seed=3)


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory):
    """A target, and a head that predicts it exactly, from any features."""
    folder = tmp_path_factory.mktemp("bigrams")
    target = bigram_target(folder / "target")
    return target, bigram_head(folder / "head", target)


@pytest.fixture
def exact(monkeypatch):
    """Let features arrive as they were made, without the loss of float8."""
    rows: dict[tuple[bytes, bytes], torch.Tensor] = {}

    def to_exact(start, given):
        made = to_features(start, given)
        for index, row in enumerate(given):
            one = made.after(start + index)
            rows[one.data[: made.width], one.scales[:4]] = row
        return made

    def read_exact(features, width):
        parts = [features.after(features.start + index) for index in range(features.count)]
        return torch.stack([rows[part.data[:width], part.scales[:4]] for part in parts])

    monkeypatch.setattr(target_features, "to_features", to_exact)
    monkeypatch.setattr(draft_heads, "read_features", read_exact)


def params(temperature, **others):
    return SamplingParams(temperature=temperature, seed=4, **others)


def remote(links, made, prompt=PROMPT, **options):
    return Remote(*links, prompt, made, session_id=f"r{next(_numbers)}", **{"gamma": 4, **options})


async def plain(links, made, count=COUNT, prompt=PROMPT):
    return await Driver(links[0], None, prompt, made, COUPLED, session_id=f"p{next(_numbers)}").generate(
        count
    )


class Local(Driver):
    """Lets the head in the target worker draft in every cycle."""

    async def run_cycle(self) -> Proposal:
        head = target_pb.HeadDraft(gamma=self.gamma, max_nodes=self.max_nodes)
        result = await self._feed(self.target, target_pb.VerifyBlock, head=head)
        proposal = proposal_from_proto(result.drafted, 2**31)
        self.tokens += [proposal.token_ids[node] for node in result.verdict.accepted_path]
        self.tokens.append(result.verdict.next_token_id)
        return proposal


@pytest.mark.parametrize("variant", ["llama", "llama-residual", "qwen3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_are_those_of_gamma_0(random_target, variant, temperature):
    made = params(temperature)
    async with pair(random_target, DATA / variant) as links:
        expected = await plain(links, made)
        for options in ({}, {"gamma": 1}, {"max_nodes": 12}, {"gamma": 2, "max_nodes": 30}, {"every": 3}):
            one = remote(links, made, **options)
            assert await one.generate(COUNT) == expected, options
            assert one.drafted > one.cycles / 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("weights", ["auto", "int8"])
async def test_exact_head_is_accepted_in_every_cycle_but_the_first(bigrams, temperature, weights):
    async with pair(*bigrams, draft={"draft_weights": weights}) as links:
        one = remote(links, params(temperature))
        assert await one.generate(COUNT) == await plain(links, params(temperature))
        fewest = 1 + -(-(COUNT - 1) // 5)
        assert one.cycles <= (fewest if weights == "auto" else 2 * fewest)


@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_every_method_accepts_an_exact_head(bigrams, method, monkeypatch):
    precise = partial(HeadScheduler, draft_top_k=97, weight_bits=20)
    monkeypatch.setattr("services.draft.worker.HeadScheduler", precise)
    async with pair(*bigrams) as links:
        one = remote(links, params(0.8), method=method)
        await one.generate(COUNT)
        share = one.accepted / one.drafted
        assert share < 0.9 if method is VerificationMethod.NAIVE else share > 0.99


@pytest.mark.parametrize("variant", ["llama", "llama-residual", "qwen3"])
@pytest.mark.parametrize("shape", [{}, {"max_nodes": 12}])
async def test_proposals_are_those_of_the_head_in_the_target_worker(random_target, variant, shape, exact):
    assert await shares_equal(random_target, variant, shape) == 1.0


async def test_rounded_features_change_few_proposals(random_target):
    assert 0.5 < await shares_equal(random_target, "llama", {}) <= 1.0


async def test_features_of_the_next_position_change_the_proposals(random_target, exact, monkeypatch):
    """A planted fault: each feature is that of the position after its own."""
    take = target_features.FeatureSource.take
    monkeypatch.setattr(
        target_features.FeatureSource,
        "take",
        lambda self, block, start, states: take(self, block, start, states.roll(-1, 0)),
    )
    assert await shares_equal(random_target, "llama", {}) < 0.8


async def shares_equal(target, variant, shape):
    """Return the share of cycles in which the head proposes the same in both places."""
    head = DATA / variant
    async with (
        pair(target, head) as links,
        running("target", target, head=str(head), deterministic=True) as (other, _),
    ):
        here = remote(links, params(0.0), **shape)
        there = Local(other, None, PROMPT, params(0.0), gamma=4, session_id="local", **shape)
        here.tokens, there.tokens = list(PROMPT), list(PROMPT)
        same = 0
        for _ in range(30):
            before = list(here.tokens)
            there.tokens = list(before)
            own, others = await here.run_cycle(), await there.run_cycle()
            same += replace(own, draft_distributions=None) == others
        assert here.drafted > 60
        return same / 30


async def test_features_cost_their_width_and_four_bytes_per_committed_token(random_target):
    width = 32
    async with pair(random_target, DATA / "llama") as links:
        one = remote(links, params(0.0))
        await one.generate(COUNT)
        assert {features.width for features in one.sent} == {width}
        committed = sum(features.count for features in one.sent)
        assert sum(features.num_bytes for features in one.sent) == committed * (width + 4)
        assert one.sent[0].start == 0
        for before, after in itertools.pairwise(one.sent):
            assert after.start == before.end


async def test_window_bounds_the_features_of_a_prompt(bigrams):
    prompt = random_tokens(180, seed=9)
    async with pair(*bigrams, feature_window=50, max_batch_tokens=64) as links:
        one = remote(links, params(0.0), prompt)
        assert await one.generate(30) == await plain(links, params(0.0), 30, prompt)
        assert (one.sent[0].start, one.sent[0].end) == (130, 180)
        assert one.cycles <= 1 + -(-29 // 5)
        other = remote(links, params(0.0), random_tokens(181, seed=9))
        other.tokens = [*other.prompt[:180], one.tokens[180]]
        await other.verify(Proposal(tuple(one.tokens[181:185])))
        assert (other.accepted, other.kept[0].start, other.kept[0].end) == (4, 135, 185)


async def test_shared_prefix_and_new_owner_have_features_of_what_is_computed(bigrams):
    async with pair(*bigrams) as links:
        one = remote(links, params(0.0))
        await one.generate(20)
        one.held.clear()  # another orchestrator: it sends everything, and has no features
        one.kept.clear()
        one.end = 0
        assert await one.propose() is not None
        await one.verify(Proposal())
        assert one.kept[0].start == len(one.tokens) - 2
        cycles = one.cycles
        for _ in range(5):
            await one.run_cycle()
        assert one.cycles - cycles == 5
        assert one.tokens[len(PROMPT) :][:40] == await plain(links, params(0.0), 40)
        assert len(one.tokens) >= len(PROMPT) + 20 + 1 + 5 * 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_lost_features_start_the_head_later(random_target, temperature):
    made = params(temperature)
    async with pair(random_target, DATA / "llama") as links:
        expected = await plain(links, made)
        one = remote(links, made)
        one.tokens, empty = list(PROMPT), 0
        while len(one.tokens) < len(PROMPT) + COUNT:
            if one.cycles % 4 == 1:
                one.kept.clear()
            empty += not await one.run_cycle()
        assert one.tokens[len(PROMPT) :][:COUNT] == expected
        assert 0 < empty < one.cycles / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("lost", ["draft", "target"])
async def test_tokens_stay_the_same_through_the_death_of_a_worker(random_target, temperature, lost):
    made, head = params(temperature), DATA / "llama"
    async with pair(random_target, head) as links, pair(random_target, head) as others:
        expected = await plain(links, made)
        one = remote(links, made)
        one.tokens = list(PROMPT)
        while len(one.tokens) < len(PROMPT) + COUNT:
            if one.cycles == 4:
                one.target = others[0] if lost == "target" else one.target
                one.draft = others[1] if lost == "draft" else one.draft
                one.held.pop(lost == "target")
                drafted = one.drafted
            await one.run_cycle()
        assert one.tokens[len(PROMPT) :][:COUNT] == expected
        assert one.drafted - drafted > 20


async def test_proposals_depend_on_the_features_at_hand_only(random_target, exact):
    """Whatever was drafted and refused, and whatever others proposed, a fresh session drafts the same."""
    async with pair(random_target, DATA / "llama") as links:
        one = remote(links, params(0.0), every=3)
        one.tokens = list(PROMPT)
        for _ in range(24):
            before = list(one.tokens)
            proposal = await one.run_cycle()
            if one.cycles % 3 or one.cycles < 2:
                continue
            fresh = remote(links, params(0.0))
            fresh.tokens = before[:-1]
            await fresh.verify(Proposal())
            assert fresh.tokens == before
            assert await fresh.propose() == proposal


async def test_repeated_block_gives_the_same_proposal(random_target):
    async with pair(random_target, DATA / "llama") as links:
        one = remote(links, params(0.0))
        await one.generate(10)
        kept = list(one.kept)
        first = await one.propose()
        for _ in range(2):  # the answer was lost
            one.kept = list(kept)
            assert await one.propose() == first
        assert len(first) == 4


async def test_features_of_tokens_that_changed_are_not_used(random_target, exact):
    """Another owner may continue otherwise; the two features that it brings do not cover all that changed."""
    async with pair(random_target, DATA / "llama", feature_window=2) as links:
        for number in range(4):
            one = remote(links, params(0.0))
            await one.generate(12 + number)
            one.tokens[-5:] = [7, 8, 9, 10, 11]
            one.held.clear()
            one.kept.clear()
            one.end = 0
            fresh = remote(links, params(0.0))
            fresh.tokens = list(one.tokens)
            for session in (one, fresh):
                await session.verify(Proposal())
                assert session.kept[0].count == 2
            assert await one.propose() == await fresh.propose()


async def test_many_sessions_draft_in_one_batch(bigrams):
    async with pair(*bigrams) as links:
        many = [remote(links, params(1.0), gamma=1 + number % 5) for number in range(12)]
        expected = await plain(links, params(1.0))
        for made in await asyncio.gather(*(one.generate(COUNT) for one in many)):
            assert made == expected


async def test_hostile_features_are_refused_and_harm_nothing(random_target):
    async with pair(random_target, DATA / "llama") as links:
        _, drafter = links
        expected = await plain(links, params(0.0))
        one = remote(links, params(0.0))
        one.tokens = list(PROMPT)
        await one.run_cycle()
        good = features_to_proto(one.kept[0])
        for number, (changes, reason) in enumerate(
            (
                ({"data": b"\x7f" * len(good.data)}, "not finite"),
                ({"scales": b"\xff" * len(good.scales)}, "not finite"),
                ({"width": 5}, "features.data"),
                ({"width": 16, "count": 2 * good.count, "start": 0}, "an end at"),
                ({"data": good.data[:-1]}, "features.data"),
                ({"start": 1}, "an end at 21, allowed: an end at 20"),
                ({"count": 2**32 - 1}, "features.count"),
            )
        ):
            bad = type(good)()
            bad.CopyFrom(good)
            for name, value in changes.items():
                setattr(bad, name, value)
            block = propose_block(one.tokens, session_id=f"bad{number}", gamma=4, features=bad)
            answer = await drafter.ask(block)
            assert answer.error.code == 3, answer
            assert reason in answer.error.message
        while len(one.tokens) < len(PROMPT) + COUNT:
            await one.run_cycle()
        assert one.tokens[len(PROMPT) :][:COUNT] == expected


async def test_draft_model_takes_no_features(random_target):
    async with running("draft", random_target) as (link, _):
        features = features_to_proto(to_features(0, torch.ones(2, 8)))
        answer = await link.ask(propose_block([1, 2, 3], gamma=2, features=features))
        assert "this worker has a draft model, no head" in answer.error.message
        assert (await link.info()).features == ""


async def test_workers_name_the_same_head(random_target, bigrams):
    async with pair(random_target, DATA / "llama") as (verifier, drafter):
        told = (await verifier.info()).features
        assert told == (await drafter.info()).features != ""
    async with running("target", random_target, features=str(DATA / "qwen3")) as (verifier, _):
        assert (await verifier.info()).features not in ("", told)


async def test_target_without_features_sends_none(random_target):
    async with running("target", random_target) as (verifier, _):
        one = remote((verifier, None), params(0.0))
        one.tokens = list(PROMPT)
        await one.verify(Proposal())
        assert not one.kept
        assert (await verifier.info()).features == ""


async def test_states_that_are_not_finite_are_not_sent(bigrams, monkeypatch):
    take = target_features.FeatureSource.take
    monkeypatch.setattr(
        target_features.FeatureSource,
        "take",
        lambda self, block, start, states: take(self, block, start, states * float("nan")),
    )
    async with pair(*bigrams) as links:
        one = remote(links, params(0.0))
        assert await one.generate(10) == await plain(links, params(0.0), 10)
        assert (one.sent, one.drafted) == ([], 0)


async def test_heads_that_do_not_fit_stop_the_start(random_target, tmp_path):
    with pytest.raises(InvalidArgumentError, match="target_model: got"):
        async with running("draft", DATA / "llama"):
            pass
    with pytest.raises(InvalidArgumentError, match=r"features: got .* none with a head"):
        async with running("target", random_target, features=str(DATA / "llama"), head=str(DATA / "llama")):
            pass
    broken = changed(
        "llama", tmp_path, weights=lambda tensors: {k: t for k, t in tensors.items() if "fc" not in k}
    )
    for role, settings in (
        ("target", {"features": str(broken)}),
        ("draft", {"target_model": str(random_target)}),
    ):
        with pytest.raises(Exception, match=r"it lacks 1 weights, such as fc|is no head"):
            async with running(role, random_target if role == "target" else broken, **settings):
                pass


async def test_features_of_many_prompts_are_split_over_frames(bigrams, monkeypatch):
    limit = 4000
    monkeypatch.setattr(target_worker, "MAX_ANSWER_BYTES", limit)
    async with pair(*bigrams) as links:
        many = [remote(links, params(0.0)) for _ in range(12)]
        for one in many:
            one.tokens = list(PROMPT)
        await asyncio.gather(*(one.verify(Proposal()) for one in many))
        assert {one.kept[0].num_bytes for one in many} == {20 * 36}
        assert max(links[0].frame_sizes) <= limit // 2 // (20 * 36)
        assert sum(links[0].frame_sizes) == 12
