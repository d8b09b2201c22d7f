"""Proposals that arrive before they are requested: same text, fewer waits, no effect of invalid ones."""

import asyncio
import os
from pathlib import Path

import pytest

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import GammaPolicy, Proposal, SamplingParams, SparseDistribution, VerificationMethod
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import MAX_SUPPORT, proposal_from_proto, proposal_to_proto
from orchestrator.cycle.run import run_cycle
from orchestrator.cycle.session import Session
from orchestrator.workers import drafter as remote_draft
from orchestrator.workers.drafter import RemoteDrafter
from orchestrator.workers.fleet import Fleet
from orchestrator.workers.proposal_cache import MAX_KEPT, MAX_KEPT_BYTES, MAX_SEEN, ProposalCache
from orchestrator.workers.session_client import session_spec
from orchestrator.workers.verifier import RemoteVerifier
from services.speculation.predictions import DRAFT_TOP_K
from tests.support.engine_helpers import plain_model, random_tokens, tiny_model
from tests.support.workers.fleet_helpers import ListRegistry
from tests.support.workers.resume_helpers import request_of
from tests.support.workers.scripted_workers import NoText, ScriptedWorker, Steady, judge, scripted
from tests.support.workers.service_helpers import complete, tokens_of
from tests.support.workers.service_helpers import running as orchestrating
from tests.support.workers.workers_helpers import running

VOCAB, LENGTH = 97, 60
PROMPT = tuple(random_tokens(12, seed=3))


def message(token_ids, proposal, *, epoch=1, base_position=4):
    return draft_pb.AheadProposal(
        session_id="s",
        epoch=epoch,
        base_position=base_position,
        token_ids=token_ids,
        gamma=4,
        proposal=proposal_to_proto(proposal),
    )


def test_prepared_chain_is_cut_with_its_distributions_and_too_large_trees_are_skipped():
    prepared = ProposalCache(VOCAB)
    prepared.expect(1, 4)
    distributions = tuple(SparseDistribution((token, token + 1), (3, 1), 2) for token in (1, 2, 3))
    prepared.put(message([7], Proposal((1, 2, 3), None, distributions)))
    prepared.put(message([8], Proposal((1, 2, 3), (-1, -1, 0))))
    assert prepared.take([0] * 4 + [7], Shape(2)) == Proposal((1, 2), None, distributions[:2])
    assert prepared.take([0] * 4 + [8], Shape(2)) is None
    assert prepared.take([0] * 4 + [8], Shape(2, 3)) == Proposal((1, 2, 3), (-1, -1, 0))
    assert prepared.take([0] * 4 + [8], Shape(1, 3)) is None


def test_prepared_proposals_are_bounded_and_invalid_tokens_are_rejected():
    prepared = ProposalCache(VOCAB)
    prepared.expect(1, 4)
    for token in range(MAX_SEEN):
        prepared.put(message([token], Proposal((VOCAB,))))
    with pytest.raises(GammarayError, match="token"):
        prepared.take([0] * 4 + [0], Shape(3))
    assert prepared.take([0] * 4 + [MAX_KEPT], Shape(3)) is None
    prepared.put(message([0], Proposal((1,))))
    with pytest.raises(GammarayError, match=f"more than {MAX_SEEN} for one cycle"):
        prepared.take([0] * 4 + [0], Shape(3))
    assert prepared.num_bytes == 0
    prepared.expect(1, 5)
    assert prepared.take([0] * 5 + [0], Shape(3)) is None


@pytest.mark.parametrize(
    ("outcome", "proposal", "wanted"),
    [
        pytest.param([], Proposal((1,)), "ahead.token_ids: got 0 ids", id="no-outcome"),
        pytest.param([1] * 66, Proposal((1,)), "ahead.token_ids: got 66 ids", id="long-outcome"),
        pytest.param([1], Proposal((1,) * 257), "ahead.proposal: got 257 nodes", id="large-proposal"),
    ],
)
def test_invalid_prepared_proposal_fails_the_cycle_and_is_dropped(outcome, proposal, wanted):
    prepared = ProposalCache(VOCAB)
    prepared.expect(1, 4)
    prepared.put(message([7], Proposal((1, 2, 3))))
    prepared.put(message(outcome, proposal))
    assert prepared.num_bytes == 0
    with pytest.raises(GammarayError, match=wanted):
        prepared.take([0] * 4 + [7], Shape(3))
    prepared.expect_nothing()
    prepared.put(message([7], Proposal((1,)), base_position=0))
    assert prepared.take([7], Shape(3)) is None


def test_prepared_bytes_are_bounded_and_excess_proposals_are_dropped():
    prepared = ProposalCache(VOCAB)
    prepared.expect(1, 4)
    distribution = SparseDistribution(tuple(range(64)), (64,) * 64, 12)
    for token in range(MAX_KEPT):
        prepared.put(message([token], Proposal((1,) * 256, None, (distribution,) * 256)))
    assert 0 < prepared.num_bytes <= MAX_KEPT_BYTES
    assert prepared.take([0] * 4 + [0], Shape(3)) is not None
    assert prepared.take([0] * 4 + [MAX_KEPT - 1], Shape(3)) is None


def test_prepared_does_not_keep_the_frame_that_it_came_in():
    prepared = ProposalCache(VOCAB)
    prepared.expect(1, 4)
    other = draft_pb.AheadProposal(session_id="t", token_ids=[VOCAB] * 2_000_000)
    before = _resident_bytes()
    for token in range(MAX_KEPT):
        good = message([token], Proposal((1,)))
        frame = draft_pb.ProposeResponse.FromString(
            draft_pb.ProposeResponse(ahead=[good, other]).SerializeToString()
        )
        prepared.put(frame.ahead[0])
    del good, frame
    assert prepared.take([0] * 4 + [MAX_KEPT - 1], Shape(3)) == Proposal((1,))
    assert _resident_bytes() - before < 100e6, "all frames together are 256 MB"


def _resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_distributions_may_have_the_largest_support():
    assert DRAFT_TOP_K <= MAX_SUPPORT

    def parsed(size):
        distribution = SparseDistribution(tuple(range(size)), (1,) * (size - 1) + (2**13 - size + 1,), 13)
        return proposal_from_proto(proposal_to_proto(Proposal((1,), None, (distribution,))), 10**6)

    assert len(parsed(MAX_SUPPORT).draft_distributions[0].token_ids) == MAX_SUPPORT
    with pytest.raises(GammarayError, match="4097 ids, allowed: at most 4096"):
        parsed(MAX_SUPPORT + 1)


class Counting(ProposalCache):
    """Counts the proposals that were taken, over all sessions."""

    num_taken = 0

    def take(self, *given):
        proposal = super().take(*given)
        Counting.num_taken += proposal is not None
        return proposal


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tiny_model("llama", tmp_path_factory.mktemp("prepared"), seed=1, max_position_embeddings=256)
    module = plain_model(directory)
    module.lm_head.weight.data.mul_(4.0)  # as sure of itself as a trained model
    module.save_pretrained(directory)
    return directory


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", list(VerificationMethod))
async def test_prepared_proposals_change_no_token(monkeypatch, model, method, temperature):
    monkeypatch.setattr(remote_draft, "ProposalCache", Counting)
    texts, hits = [], []
    for ahead in (False, True):
        monkeypatch.setattr(Counting, "num_taken", 0)
        async with (
            running("target", model) as (target, _),
            running("draft", model, draft_ahead=ahead) as (draft, worker),
        ):
            registry = ListRegistry()
            registry.known = {"target": {target.address}, "draft": {draft.address}}
            fleet = Fleet(registry.workers, VOCAB)
            await fleet.start(30.0)
            params = SamplingParams(temperature=temperature, seed=5)
            session = Session("s", PROMPT, params, method, LENGTH, NoText(), epoch=1)
            spec = session_spec(session, frozenset(), shares_caches=True)
            drafter = RemoteDrafter(
                fleet.drafts, spec, timeout_s=30.0, prefill_timeout_s=30.0, vocab_size=VOCAB
            )
            verifier = RemoteVerifier(fleet.targets, spec, timeout_s=30.0, wait_s=30.0)
            num_prepared = 0
            while session.finish_reason is None:
                cycle = await run_cycle(session, drafter, verifier, Steady(3))
                num_prepared += cycle.is_prepared
                # As long as a large target would take, and as this machine needs at present.
                while await worker.engine.call(lambda scheduler: scheduler.has_work):
                    pass
                await asyncio.sleep(0.02)
            texts.append(session.token_ids)
            assert num_prepared == Counting.num_taken
            hits.append(num_prepared)
            await fleet.close()
    assert texts[0] == texts[1]
    assert hits[0] == 0
    assert hits[1] >= 3


DEMO = {"vocab_size": 2048, "max_context": 1024}
NUM_TOKENS, GAMMA = 24, 3
GOOD = pb.Proposal(token_ids=[1, 2, 3])


class Pusher(ScriptedWorker):
    """Answers as a correct drafter does, and sends unrequested proposals in the same frame.

    Attributes:
        push: Returns the unrequested proposals for a block, its committed tokens and the outcome of its
            verification.
    """

    push = staticmethod(lambda block, tokens, outcome: [])

    async def _serve(self, requests, response_type):
        async for frame in requests:
            self.frames.append(frame)
            self.released += [release.session_id for release in frame.releases]
            for block in frame.blocks:
                result = self.work(block)
                yield response_type(results=[result], ahead=self._ahead(block, result))

    def _ahead(self, block, result):
        if result.WhichOneof("outcome") != "proposal":
            return []
        tokens = self.held[block.session_id]
        proposal = list(result.proposal.token_ids)
        verdict = judge(tokens, proposal)
        outcome = [*proposal[: len(verdict.accepted_path)], verdict.next_token_id]
        return self.push(block, tokens, outcome)


def ahead(block, token_ids, proposal=GOOD, **changes):
    fields = {"session_id": block.session_id, "epoch": block.epoch, "base_position": block.base_position}
    return draft_pb.AheadProposal(
        **{**fields, **changes}, token_ids=token_ids, gamma=GAMMA, proposal=proposal
    )


def thousands(block, tokens, outcome):
    return [ahead(block, [token, other]) for token in range(60) for other in range(60)]


def garbage_tokens(block, tokens, outcome):
    return [ahead(block, outcome, pb.Proposal(token_ids=[2048, 2**32 - 1]))]


@pytest.fixture
async def pusher():
    worker = Pusher("draft", **DEMO)
    await worker.start()
    yield worker
    await worker.stop()


async def tokens_and_summary(redis_server, target, drafters, gamma):
    addresses = ",".join(worker.address for worker in drafters)
    async with orchestrating(redis_server, target.address, addresses, propose_timeout_s=30.0) as orchestrator:
        for other in drafters[1:]:  # the first is chosen first
            orchestrator.fleet.drafts.links[other.address].sessions |= {"x", "y"}
        chunks = await complete(orchestrator, request_of(max_tokens=NUM_TOKENS, gamma=GammaPolicy(gamma)))
    return tokens_of(chunks), chunks[-1].summary


@pytest.mark.integration
async def test_proposals_for_other_sessions_are_dropped(redis_server, pusher):
    def other_sessions(block, tokens, outcome):
        return [ahead(block, outcome, session_id=f"{block.session_id}{n}") for n in range(3000)]

    pusher.push = other_sessions
    async with scripted("target", **DEMO) as target:
        plain, _ = await tokens_and_summary(redis_server, target, [], 0)
        tokens, summary = await tokens_and_summary(redis_server, target, [pusher], GAMMA)
    assert tokens == plain
    assert summary.model_cycles > 0
    assert summary.fallback_cycles == 0


@pytest.mark.integration
@pytest.mark.parametrize("push", [thousands, garbage_tokens], ids=lambda push: push.__name__)
async def test_session_moves_from_a_hostile_to_a_good_drafter(redis_server, pusher, push):
    pusher.push = push
    async with scripted("target", "draft", **DEMO) as (target, good):
        plain, _ = await tokens_and_summary(redis_server, target, [], 0)
        tokens, summary = await tokens_and_summary(redis_server, target, [pusher, good], GAMMA)
        assert tokens == plain
        assert good.blocks
        assert summary.draft_workers == 2
