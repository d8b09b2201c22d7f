"""Blocks to wire messages and back: nothing is lost, and messages of hostile workers are refused."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray import InternalError, InvalidArgumentError
from gammaray.blocks import Shape, TokenLogprobs, Verdict, VerifyTiming
from gammaray.types import MAX_GAMMA, MAX_NODES, PromptLogprobs, Proposal, SparseDistribution, TokenOrigin
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import (
    fill_verdict,
    prompt_logprobs_from_proto,
    proposal_from_proto,
    proposal_to_proto,
    shape_from_proto,
    shape_to_proto,
    verdict_from_proto,
)

VOCAB = 500

floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31)
token_ids = st.integers(0, VOCAB - 1)

shapes = st.builds(Shape, st.integers(1, MAX_GAMMA), st.integers(0, MAX_NODES))
logprobs = st.builds(TokenLogprobs, floats, st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple))
verdicts = st.builds(
    Verdict,
    st.lists(counts, max_size=5).map(tuple),
    token_ids,
    st.sampled_from(TokenOrigin),
    counts,
    st.lists(logprobs, max_size=4).map(tuple),
)


@st.composite
def distributions(draw):
    bits = draw(st.integers(1, 12))
    size = draw(st.integers(1, min(6, 2**bits)))
    ids = draw(st.lists(token_ids, min_size=size, max_size=size, unique=True))
    inner = st.integers(1, 2**bits - 1)
    cuts = sorted(draw(st.lists(inner, min_size=size - 1, max_size=size - 1, unique=True)))
    edges = [0, *cuts, 2**bits]
    weights = tuple(edges[i + 1] - edges[i] for i in range(size))
    return SparseDistribution(tuple(ids), weights, bits)


@st.composite
def proposals(draw):
    ids = draw(st.lists(token_ids, max_size=8))
    shape, laws = None, None
    if ids and draw(st.booleans()):
        shape = tuple(draw(st.integers(-1, node - 1)) for node in range(len(ids)))
    elif ids and draw(st.booleans()):
        laws = tuple(draw(distributions()) for _ in ids)
    return Proposal(tuple(ids), shape, laws)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def over_streams(verdict, has_logprobs=True, **timing):
    """Return a verdict as the orchestrator reads the target worker's answer."""
    result = target_pb.VerifyResult(timing=pb.WorkerTiming(**timing))
    fill_verdict(result.verdict, verdict)
    return verdict_from_proto(over_the_wire(result), VOCAB, has_logprobs=has_logprobs)


@given(shapes)
def test_shape_round_trip(shape):
    found = shape_from_proto(over_the_wire(shape_to_proto(shape)))
    assert dataclasses.astuple(found) == dataclasses.astuple(shape)


def test_shape_out_of_bounds_is_refused():
    for field, value in (("gamma", 0), ("gamma", MAX_GAMMA + 1), ("max_nodes", MAX_NODES + 1)):
        with pytest.raises(InvalidArgumentError) as caught:
            shape_from_proto(draft_pb.ProposeBlock(**{"gamma": 1, field: value}))
        assert caught.value.field == field


@given(verdicts)
def test_verdict_round_trip(verdict):
    assert over_streams(verdict) == verdict
    assert over_streams(verdict, has_logprobs=False) == dataclasses.replace(verdict, logprobs=())


def test_verdict_has_the_timing_of_the_workers_step():
    timing = {"queue_us": 50, "compute_us": 2000, "batch_size": 2, "batch_tokens": 7, "batch_rows": 3}
    found = over_streams(Verdict((), 1, TokenOrigin.BONUS, 0), **timing)
    assert found.timing == VerifyTiming(pytest.approx(5e-5), pytest.approx(2e-3), 2, 7, 3)


def test_log_probabilities_of_the_prompt_travel_without_its_tokens():
    prompt = PromptLogprobs((3, 4, 5), (-1.0, -2.0), (1, 2), 1, (4, 9), (-1.0, -0.5))
    message = target_pb.Verdict()
    fill_verdict(message, Verdict((), 1, TokenOrigin.BONUS, 0, prompt_logprobs=prompt))
    sent = over_the_wire(message).prompt_logprobs
    assert not sent.token_ids
    assert prompt_logprobs_from_proto(sent, (3, 4, 5)) == prompt
    with pytest.raises(InternalError, match="a prompt of 2 tokens"):
        prompt_logprobs_from_proto(sent, (3, 4))


@pytest.mark.parametrize(
    "changes",
    [
        {"next_token_id": VOCAB},
        {"next_origin": 0},
        {"logprobs": [{"logprob": math.nan}]},
        {"logprobs": [{"top_token_ids": [1], "top_logprobs": []}]},
        {"logprobs": [{"top_token_ids": [1], "top_logprobs": [math.nan]}]},
        {"logprobs": [{"top_token_ids": [VOCAB], "top_logprobs": [0.0]}]},
    ],
)
def test_verdict_of_a_hostile_worker_is_refused(changes):
    fields = {"next_token_id": 1, "next_origin": pb.TOKEN_ORIGIN_BONUS, **changes}
    result = target_pb.VerifyResult(verdict=target_pb.Verdict(**fields))
    with pytest.raises(InternalError):
        verdict_from_proto(over_the_wire(result), VOCAB, has_logprobs=True)


@given(proposals())
def test_proposal_round_trip(proposal):
    assert proposal_from_proto(over_the_wire(proposal_to_proto(proposal)), VOCAB) == proposal


def law(ids=(1, 2), weights=(3, 5), bits=3):
    return pb.SparseDistribution(token_ids=ids, weights=weights, weight_bits=bits)


WRONG_LAWS = {
    "weight_bits": [law(bits=0), law(bits=25)],
    "token_ids": [law(ids=(1, 1)), law(ids=(1, VOCAB)), law(ids=(1,))],
    "weights": [law(weights=(3, 4)), law(weights=(0, 8)), law(ids=(), weights=())],
}


def test_proposal_of_a_hostile_drafter_is_refused(subtests):
    for proposal, field in [
        (pb.Proposal(token_ids=[1, VOCAB]), "proposal.token_ids"),
        (pb.Proposal(token_ids=[1, 2], parents=[-1]), "proposal.parents"),
        (pb.Proposal(token_ids=[1, 2], parents=[-1, 1]), "proposal.parents[1]"),
        (pb.Proposal(token_ids=[1], parents=[-2]), "proposal.parents[0]"),
        (pb.Proposal(token_ids=[1, 2], draft_distributions=[law()]), "proposal.draft_distributions"),
        (pb.Proposal(draft_distributions=[law()]), "proposal.draft_distributions"),
        *(
            (pb.Proposal(token_ids=[1], draft_distributions=[wrong]), f"proposal.draft_distributions.{name}")
            for name, laws in WRONG_LAWS.items()
            for wrong in laws
        ),
    ]:
        with subtests.test(str((proposal, field))[:80]):
            with pytest.raises(InvalidArgumentError) as caught:
                proposal_from_proto(over_the_wire(proposal), VOCAB)
            assert caught.value.field == field


@given(
    st.builds(
        pb.Proposal,
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4),
        parents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    )
)
def test_proposal_of_any_shape_is_rejected_or_a_valid_tree(message):
    try:
        proposal = proposal_from_proto(message, VOCAB)
    except InvalidArgumentError:
        return
    assert 0 <= proposal.depth <= len(proposal)
    assert all(token_id < VOCAB for token_id in proposal.token_ids)
