"""Types and blocks to wire messages and back: nothing is lost, and messages of hostile peers are refused."""

import dataclasses
import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray import InternalError, InvalidArgumentError
from gammaray import types as t
from gammaray.blocks import Shape, TokenLogprobs, Verdict, VerifyTiming
from gammaray.v1 import generation_service_pb2 as gen
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire import blocks, convert

VOCAB = 500

floats = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31)
token_ids = st.integers(0, VOCAB - 1)
id_tuples = st.lists(token_ids, max_size=5).map(tuple)
text = st.text(max_size=20)
names = st.text(st.sampled_from("abzAZ09_.-"), max_size=128)

sampling = st.builds(
    t.SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=counts,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=4),
    allowed_token_ids=id_tuples,
    banned_token_ids=id_tuples,
    min_tokens=counts,
    seed=st.none() | st.integers(0, 2**64 - 1),
    sample_index=st.integers(0, 2**24 - 1),
)
gammas = st.builds(
    t.GammaPolicy,
    fixed=st.none() | st.integers(0, t.MAX_GAMMA),
    max_gamma=st.integers(0, t.MAX_GAMMA),
    max_nodes=st.integers(0, t.MAX_NODES),
).map(lambda policy: replace(policy, max_gamma=policy.max_gamma and max(policy.max_gamma, policy.fixed or 0)))
requests = st.builds(
    t.GenerationRequest,
    prompt=st.text(min_size=1, max_size=20) | st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    model=text,
    sampling=sampling,
    max_tokens=st.integers(1, 2**31),
    stop=st.lists(st.text(min_size=1, max_size=20), max_size=16).map(tuple),
    stop_token_ids=id_tuples,
    ignore_eos=st.booleans(),
    num_top_logprobs=st.none() | st.integers(0, t.MAX_TOP_LOGPROBS),
    verification=st.sampled_from(t.VerificationMethod),
    gamma=gammas,
    drafter=st.sampled_from(t.DrafterKind),
    session_id=names,
    prediction=st.text(max_size=20) | st.lists(token_ids, min_size=1, max_size=5).map(tuple),
    num_prompt_logprobs=st.none() | st.integers(0, t.MAX_TOP_LOGPROBS),
).map(lambda request: replace(request, max_tokens=max(request.max_tokens, request.sampling.min_tokens)))
unstored = requests.map(lambda request: replace(request, store=False, session_id=""))
tops = st.builds(t.TopLogprob, token_ids, floats, st.binary(max_size=4))
emitted = st.builds(
    t.EmittedToken,
    token_id=token_ids,
    origin=st.sampled_from(t.TokenOrigin),
    token_bytes=st.binary(max_size=6),
    logprob=st.none() | floats,
    top_logprobs=st.lists(tops, max_size=3).map(tuple),
    drafter=st.none() | st.sampled_from(t.DrafterKind),
)
TIMES = ("draft_ms", "verify_ms", "other_ms", "total_ms")
COUNTS = ("cycles", "suffix_cycles", "prediction_cycles", "drafted_tokens", "accepted_tokens")
summaries = st.builds(
    t.SpeculationSummary,
    **dict.fromkeys(("tokens_per_cycle", "gamma_mean", *TIMES), floats),
    **dict.fromkeys(("alpha", "acceptance_rate", "speedup_estimate"), st.none() | floats),
    **dict.fromkeys(COUNTS, counts),
    accepted_lengths=st.lists(counts, max_size=9).map(tuple),
)


@st.composite
def prompt_logprobs(draw):
    size, num_top = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    entries = max(0, size - 1)

    def column(values, length):
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return t.PromptLogprobs(
        column(token_ids, size),
        *(column(floats, entries), column(counts, entries)),
        *(num_top, column(token_ids, entries * num_top), column(floats, entries * num_top)),
    )


chunks = st.builds(
    t.Chunk,
    session_id=names,
    text=text,
    tokens=st.lists(emitted, max_size=4).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    finish_reason=st.none() | st.sampled_from(t.FinishReason),
    usage=st.none() | st.builds(t.Usage, counts, counts, counts, counts),
    summary=st.none() | summaries,
    prompt_tokens=counts,
    prompt_logprobs=st.none() | prompt_logprobs(),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


@given(requests | unstored | st.just(t.GenerationRequest("Hi")))
def test_request_round_trip(request):
    assert convert.request_from_proto(over_the_wire(convert.request_to_proto(request))) == request


@given(chunks)
def test_chunk_round_trip(chunk):
    assert convert.chunk_from_proto(over_the_wire(convert.chunk_to_proto(chunk))) == chunk


def totals(kind):
    return st.none() | st.builds(kind, **{field.name: counts for field in dataclasses.fields(kind)})


@given(
    st.builds(
        t.ProcessStatus,
        *(text, counts, text, text, st.booleans(), counts, text, counts, counts, counts),
        *(totals(t.WorkerTotals), totals(t.SpeculationTotals)),
        st.lists(counts).map(tuple),
    )
)
def test_process_status_round_trip(process):
    assert convert.process_from_proto(over_the_wire(convert.process_to_proto(process))) == process


def test_types_and_messages_have_the_same_number_of_fields():
    for cls, message, extra in (
        (t.SamplingParams, pb.SamplingParams, 0),
        (t.GenerationRequest, gen.GenerateRequest, 1),  # a prompt is two alternatives of the message
        (t.Chunk, gen.GenerateResponse, 0),
        (t.EmittedToken, gen.EmittedToken, 0),
    ):
        assert len(dataclasses.fields(cls)) + extra == len(message.DESCRIPTOR.fields), cls


def test_request_wrong_message_is_refused_and_the_field_named(subtests):
    """Each field by its check of the type, which test_request.py tests in full."""
    for message, field in [
        (gen.GenerateRequest(), "prompt"),
        (gen.GenerateRequest(token_ids=gen.TokenIds()), "prompt"),
        (gen.GenerateRequest(text="Hi", gamma=gen.GammaPolicy(max_nodes=257)), "max_nodes"),
        (gen.GenerateRequest(text="Hi", sampling=pb.SamplingParams(temperature=float("nan"))), "temperature"),
        (gen.GenerateRequest(text="Hi", prediction=gen.Prediction(text="x" * (2**16 + 1))), "prediction"),
    ]:
        with subtests.test(str((message, field))[:80]):
            with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)}: got"):
                convert.request_from_proto(over_the_wire(message))


@pytest.mark.parametrize("field", ["verification", "drafter"])
def test_request_enum_value_of_a_later_version_is_refused(field):
    later = gen.GenerateRequest(text="Hi")
    # proto3 enums are open: the wire may carry any number.
    number = gen.GenerateRequest.DESCRIPTOR.fields_by_name[field].number
    later.MergeFromString(bytes([number << 3, 99]))
    with pytest.raises(InvalidArgumentError, match=f"^{field}: got"):
        convert.request_from_proto(later)


@pytest.mark.parametrize("origin", [0, 99])
def test_chunk_with_an_unknown_origin_is_a_peer_error(origin):
    message = gen.GenerateResponse.FromString(bytes([0x1A, 2, 0x10, origin]))
    assert message.tokens[0].origin == origin
    with pytest.raises(InternalError, match=f"origin {origin}"):
        convert.chunk_from_proto(message)


def test_token_of_a_drafter_that_this_version_does_not_know_has_none():
    message = gen.EmittedToken(token_id=1, origin=pb.TOKEN_ORIGIN_ACCEPTED)
    number = gen.EmittedToken.DESCRIPTOR.fields_by_name["drafter"].number
    message.MergeFromString(bytes([number << 3, 99]))
    assert convert.token_from_proto(message).drafter is None


gammas = st.integers(1, t.MAX_GAMMA)
shapes = st.builds(Shape, gammas, st.integers(0, t.MAX_NODES), gammas)
logprobs = st.builds(TokenLogprobs, floats, st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple))
verdicts = st.builds(
    Verdict,
    st.lists(counts, max_size=5).map(tuple),
    token_ids,
    st.sampled_from(t.TokenOrigin),
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
    return t.SparseDistribution(tuple(ids), weights, bits)


@st.composite
def proposals(draw):
    ids = draw(st.lists(token_ids, max_size=8))
    shape, laws = None, None
    if ids and draw(st.booleans()):
        shape = tuple(draw(st.integers(-1, node - 1)) for node in range(len(ids)))
    elif ids and draw(st.booleans()):
        laws = tuple(draw(distributions()) for _ in ids)
    return t.Proposal(tuple(ids), shape, laws)


def over_streams(verdict, has_logprobs=True, **timing):
    """Return a verdict as the orchestrator reads the target worker's answer."""
    result = target_pb.VerifyResult(timing=pb.WorkerTiming(**timing))
    blocks.fill_verdict(result.verdict, verdict)
    return blocks.verdict_from_proto(over_the_wire(result), VOCAB, has_logprobs=has_logprobs)


@given(shapes)
def test_shape_round_trip(shape):
    found = blocks.shape_from_proto(over_the_wire(blocks.shape_to_proto(shape)))
    assert dataclasses.astuple(found) == dataclasses.astuple(shape)


@given(verdicts)
def test_verdict_round_trip(verdict):
    assert over_streams(verdict) == verdict
    assert over_streams(verdict, has_logprobs=False) == dataclasses.replace(verdict, logprobs=())


def test_verdict_has_the_timing_of_the_workers_step():
    timing = {"queue_us": 50, "compute_us": 2000, "batch_size": 2, "batch_tokens": 7, "batch_rows": 3}
    found = over_streams(Verdict((), 1, t.TokenOrigin.BONUS, 0), **timing)
    assert found.timing == VerifyTiming(pytest.approx(5e-5), pytest.approx(2e-3), 2, 7, 3)


def test_log_probabilities_of_the_prompt_travel_without_its_tokens():
    prompt = t.PromptLogprobs((3, 4, 5), (-1.0, -2.0), (1, 2), 1, (4, 9), (-1.0, -0.5))
    message = target_pb.Verdict()
    blocks.fill_verdict(message, Verdict((), 1, t.TokenOrigin.BONUS, 0, prompt_logprobs=prompt))
    sent = over_the_wire(message).prompt_logprobs
    assert not sent.token_ids
    assert blocks.prompt_logprobs_from_proto(sent, (3, 4, 5)) == prompt
    with pytest.raises(InternalError, match="a prompt of 2 tokens"):
        blocks.prompt_logprobs_from_proto(sent, (3, 4))


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
        blocks.verdict_from_proto(over_the_wire(result), VOCAB, has_logprobs=True)


@given(proposals())
def test_proposal_round_trip(proposal):
    assert blocks.proposal_from_proto(over_the_wire(blocks.proposal_to_proto(proposal)), VOCAB) == proposal


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
            with pytest.raises(InvalidArgumentError, match=f"^{re.escape(field)}: got"):
                blocks.proposal_from_proto(over_the_wire(proposal), VOCAB)


@given(
    st.builds(
        pb.Proposal,
        token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=4),
        parents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    )
)
def test_proposal_of_any_shape_is_rejected_or_a_valid_tree(message):
    try:
        proposal = blocks.proposal_from_proto(message, VOCAB)
    except InvalidArgumentError:
        return
    assert 0 <= proposal.depth <= len(proposal)
    assert all(token_id < VOCAB for token_id in proposal.token_ids)
