"""Drafters that send unrequested proposals over real gRPC: the same tokens in bounded memory."""

from __future__ import annotations

import pytest

from gammaray.types import GammaPolicy
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from orchestrator.workers import drafter as remote_draft
from orchestrator.workers.proposal_cache import (
    MAX_KEPT,
    MAX_KEPT_BYTES,
    MAX_SEEN,
    ProposalCache,
)
from tests.support.workers.resume_helpers import request_of
from tests.support.workers.scripted_workers import ScriptedWorker, judge, scripted
from tests.support.workers.service_helpers import complete, running, tokens_of

pytestmark = pytest.mark.integration

DEMO = {"vocab_size": 2048, "max_context": 1024}
NUM_TOKENS, GAMMA = 24, 3
GOOD = pb.Proposal(token_ids=[1, 2, 3])


class Pusher(ScriptedWorker):
    """Answers as a correct drafter does, and sends unrequested proposals in the same frame.

    Attributes:
        push: Returns the unrequested proposals for a block, its committed tokens and the outcome of its
            verification.
        num_pushed: Number of unrequested proposals.
    """

    push = staticmethod(lambda block, tokens, outcome: [])
    num_pushed = 0

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
        pushed = self.push(block, tokens, outcome)
        self.num_pushed += len(pushed)
        return pushed


def ahead(block, token_ids, proposal=GOOD, **changes):
    fields = {"session_id": block.session_id, "epoch": block.epoch, "base_position": block.base_position}
    return draft_pb.AheadProposal(
        **{**fields, **changes}, token_ids=token_ids, gamma=GAMMA, proposal=proposal
    )


def thousands(block, tokens, outcome):
    return [ahead(block, [token, other]) for token in range(60) for other in range(60)]


def as_many_as_allowed_and_large(block, tokens, outcome):
    distribution = pb.SparseDistribution(token_ids=range(2000), weights=[1] * 2000, weight_bits=11)
    proposal = pb.Proposal(token_ids=[1] * 64, draft_distributions=[distribution] * 8)
    return [ahead(block, [2047, token], proposal) for token in range(MAX_SEEN)]


def garbage_tokens(block, tokens, outcome):
    return [ahead(block, outcome, pb.Proposal(token_ids=[2048, 2**32 - 1]))]


def other_sessions(block, tokens, outcome):
    return [ahead(block, outcome, session_id=f"{block.session_id}{n}") for n in range(3000)]


LEFT = [thousands, garbage_tokens]
BORNE = [as_many_as_allowed_and_large, other_sessions]
"""`test_prepared.py` has further invalid proposals, without an orchestrator."""


class Watched(ProposalCache):
    """Records the maximum that was kept."""

    most, most_bytes = 0, 0

    def put(self, message):
        super().put(message)
        Watched.most = max(Watched.most, len(self.by_outcome))
        real_bytes = sum(4 * len(o) + len(data) for o, data in self.by_outcome.items())
        Watched.most_bytes = max(Watched.most_bytes, self.num_bytes, real_bytes)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(Watched, "most", 0)
    monkeypatch.setattr(Watched, "most_bytes", 0)
    monkeypatch.setattr(remote_draft, "ProposalCache", Watched)
    return Watched


@pytest.fixture
async def pusher():
    worker = Pusher("draft", **DEMO)
    await worker.start()
    yield worker
    await worker.stop()


async def tokens_and_summary(redis_server, target, drafters, gamma):
    addresses = ",".join(worker.address for worker in drafters)
    async with running(redis_server, target.address, addresses, propose_timeout_s=30.0) as orchestrator:
        for other in drafters[1:]:  # the first is chosen first
            orchestrator.fleet.drafts.links[other.address].sessions |= {"x", "y"}
        chunks = await complete(orchestrator, request_of(max_tokens=NUM_TOKENS, gamma=GammaPolicy(gamma)))
    return tokens_of(chunks), chunks[-1].summary


@pytest.mark.slow
@pytest.mark.parametrize("push", [*LEFT, *BORNE], ids=lambda push: push.__name__)
async def test_pushed_proposals_change_no_token_and_take_bounded_memory(redis_server, pusher, watched, push):
    async with scripted("target", **DEMO) as target:
        plain, _ = await tokens_and_summary(redis_server, target, [], 0)
        pusher.push = push
        tokens, summary = await tokens_and_summary(redis_server, target, [pusher], GAMMA)
    assert pusher.num_pushed > 0
    assert tokens == plain
    assert watched.most <= MAX_KEPT
    assert watched.most_bytes <= MAX_KEPT_BYTES
    if push in LEFT:
        assert summary.fallback_cycles > 0
        assert pusher.released
    else:
        assert summary.model_cycles > 0
        assert summary.fallback_cycles == 0


@pytest.mark.parametrize("push", LEFT, ids=lambda push: push.__name__)
async def test_session_moves_from_a_hostile_to_a_good_drafter(redis_server, pusher, push):
    pusher.push = push
    async with scripted("target", "draft", **DEMO) as (target, good):
        plain, _ = await tokens_and_summary(redis_server, target, [], 0)
        tokens, summary = await tokens_and_summary(redis_server, target, [pusher, good], GAMMA)
        assert tokens == plain
        assert good.blocks
        assert summary.draft_workers == 2
