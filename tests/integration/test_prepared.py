"""Proposals that arrive before they are requested: same text, fewer waits, no effect of invalid ones."""

import psutil
import pytest

from gammaray.blocks import Shape
from gammaray.errors import GammarayError
from gammaray.types import GammaPolicy, Proposal, SparseDistribution
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import MAX_SUPPORT, proposal_from_proto, proposal_to_proto
from orchestrator.workers.proposal_cache import MAX_KEPT, MAX_KEPT_BYTES, MAX_SEEN, ProposalCache
from services.speculation.predictions import DRAFT_TOP_K
from tests.support.workers.resume_helpers import request_of
from tests.support.workers.scripted_workers import ScriptedWorker, judge, scripted
from tests.support.workers.service_helpers import complete, tokens_of
from tests.support.workers.service_helpers import running as orchestrating

VOCAB = 97


def message(token_ids, proposal, *, base_position=4):
    return draft_pb.AheadProposal(
        session_id="s",
        epoch=1,
        base_position=base_position,
        token_ids=token_ids,
        gamma=4,
        proposal=proposal_to_proto(proposal),
    )


@pytest.fixture
def prepared():
    cache = ProposalCache(VOCAB)
    cache.expect(1, [0] * 4)
    return cache


def test_prepared_chain_is_cut_with_its_distributions_and_too_large_trees_are_skipped(prepared):
    distributions = tuple(SparseDistribution((token, token + 1), (3, 1), 2) for token in (1, 2, 3))
    prepared.put(message([7], Proposal((1, 2, 3), None, distributions)))
    prepared.put(message([8], Proposal((1, 2, 3), (-1, -1, 0))))
    assert prepared.take([0] * 4 + [7], Shape(2)) == Proposal((1, 2), None, distributions[:2])
    assert prepared.take([0] * 4 + [8], Shape(2)) is None
    assert prepared.take([0] * 4 + [8], Shape(2, 3)) == Proposal((1, 2, 3), (-1, -1, 0))
    assert prepared.take([0] * 4 + [8], Shape(1, 3)) is None


def test_prepared_proposals_are_bounded_and_invalid_tokens_are_rejected(prepared):
    for token in range(MAX_SEEN):
        prepared.put(message([token], Proposal((VOCAB,))))
    with pytest.raises(GammarayError, match="token"):
        prepared.take([0] * 4 + [0], Shape(3))
    assert prepared.take([0] * 4 + [MAX_KEPT], Shape(3)) is None
    prepared.put(message([0], Proposal((1,))))
    with pytest.raises(GammarayError, match=f"more than {MAX_SEEN} for one cycle"):
        prepared.take([0] * 4 + [0], Shape(3))
    assert prepared.num_bytes == 0
    prepared.expect(1, [0] * 5)
    assert prepared.take([0] * 5 + [0], Shape(3)) is None


def test_prepared_for_the_cycle_after_the_next_is_kept_also_if_it_is_late(prepared):
    tokens = [0] * 4
    prepared.put(message([7, 8, 9], Proposal((1,))))
    prepared.put(message([7, 5, 9], Proposal((2,))))
    tokens += [7, 8]
    prepared.expect(1, tokens)
    prepared.put(message([7, 8, 3], Proposal((3,))))  # sent before the worker heard of 7 and 8
    prepared.put(message([7, 5, 3], Proposal((4,))))
    prepared.put(message([7], Proposal((5,))))
    assert prepared.take([*tokens, 9], Shape(3)) == Proposal((1,))
    assert prepared.take([*tokens, 3], Shape(3)) == Proposal((3,))
    assert len(prepared.by_outcome) == 2
    prepared.expect(2, tokens)  # another owner
    assert prepared.take([*tokens, 9], Shape(3)) is None


@pytest.mark.parametrize(
    ("outcome", "proposal", "wanted"),
    [
        pytest.param([], Proposal((1,)), "ahead.token_ids: got 0 ids", id="no-outcome"),
        pytest.param([1] * 66, Proposal((1,)), "ahead.token_ids: got 66 ids", id="long-outcome"),
        pytest.param([1], Proposal((1,) * 257), "ahead.proposal: got 257 nodes", id="large-proposal"),
    ],
)
def test_invalid_prepared_proposal_fails_the_cycle_and_is_dropped(prepared, outcome, proposal, wanted):
    prepared.put(message([7], Proposal((1, 2, 3))))
    prepared.put(message(outcome, proposal))
    assert prepared.num_bytes == 0
    with pytest.raises(GammarayError, match=wanted):
        prepared.take([0] * 4 + [7], Shape(3))
    prepared.expect_nothing()
    prepared.put(message([7], Proposal((1,)), base_position=0))
    assert prepared.take([7], Shape(3)) is None


def test_prepared_bytes_are_bounded_and_excess_proposals_are_dropped(prepared):
    distribution = SparseDistribution(tuple(range(64)), (64,) * 64, 12)
    for token in range(MAX_KEPT):
        prepared.put(message([token], Proposal((1,) * 256, None, (distribution,) * 256)))
    assert 0 < prepared.num_bytes <= MAX_KEPT_BYTES
    assert prepared.take([0] * 4 + [0], Shape(3)) is not None
    assert prepared.take([0] * 4 + [MAX_KEPT - 1], Shape(3)) is None


def test_prepared_does_not_keep_the_frame_that_it_came_in(prepared):
    other = draft_pb.AheadProposal(session_id="t", token_ids=[VOCAB] * 2_000_000)
    before = psutil.Process().memory_info().rss
    for token in range(MAX_KEPT):
        good = message([token], Proposal((1,)))
        frame = draft_pb.ProposeResponse.FromString(
            draft_pb.ProposeResponse(ahead=[good, other]).SerializeToString()
        )
        prepared.put(frame.ahead[0])
    del good, frame
    assert prepared.take([0] * 4 + [MAX_KEPT - 1], Shape(3)) == Proposal((1,))
    assert psutil.Process().memory_info().rss - before < 100e6, "all frames together are 256 MB"


def test_distributions_may_have_the_largest_support():
    assert DRAFT_TOP_K <= MAX_SUPPORT

    def parsed(size):
        distribution = SparseDistribution(tuple(range(size)), (1,) * (size - 1) + (2**13 - size + 1,), 13)
        return proposal_from_proto(proposal_to_proto(Proposal((1,), None, (distribution,))), 10**6)

    assert len(parsed(MAX_SUPPORT).draft_distributions[0].token_ids) == MAX_SUPPORT
    with pytest.raises(GammarayError, match="4097 ids, allowed: at most 4096"):
        parsed(MAX_SUPPORT + 1)


DEMO = {"vocab_size": 2048, "max_context": 1024}
NUM_TOKENS, GAMMA = 24, 3
GOOD = pb.Proposal(token_ids=[1, 2, 3])


class Pusher(ScriptedWorker):
    """Answers as a correct drafter does, and sends what `push` returns for a block in the same frame."""

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
@pytest.mark.parametrize("is_own", [True, False], ids=["of the session", "of other sessions"])
async def test_prepared_proposals_are_taken_by_their_session_and_change_no_token(
    redis_server, pusher, is_own
):
    def own(block, tokens, outcome):
        following = pb.Proposal(token_ids=pusher.guess([*tokens, *outcome], GAMMA))
        return [ahead(block, outcome, following), ahead(block, [*outcome, 1])]

    def others(block, tokens, outcome):
        return [ahead(block, outcome, session_id=f"{block.session_id}{n}") for n in range(3000)]

    pusher.push = own if is_own else others
    async with scripted("target", **DEMO) as target:
        plain, _ = await tokens_and_summary(redis_server, target, [], 0)
        target.delay_s = 0.1  # a proposal ahead is there before the outcome that it is for
        tokens, summary = await tokens_and_summary(redis_server, target, [pusher], GAMMA)
    assert tokens == plain
    assert summary.fallback_cycles == 0
    # Of a proposal that was taken the worker is told, to go on.
    num_taken = sum(block.is_notice for block in pusher.blocks)
    assert num_taken >= summary.model_cycles - 2 if is_own else num_taken == 0
    assert summary.model_cycles > 5


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
