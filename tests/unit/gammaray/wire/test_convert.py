"""Types to wire messages and back: nothing is lost, and messages of peers are checked."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gammaray import InternalError, InvalidArgumentError
from gammaray import types as t
from gammaray.types import SpeculationTotals, WorkerTotals
from gammaray.v1 import generation_service_pb2 as gen
from gammaray.v1 import types_pb2 as pb
from gammaray.wire import convert
from gammaray.wire.convert import process_from_proto, process_to_proto

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
emitted = st.builds(
    t.EmittedToken,
    token_id=token_ids,
    origin=st.sampled_from(t.TokenOrigin),
    token_bytes=st.binary(max_size=6),
    logprob=st.none() | floats,
    top_logprobs=st.lists(st.builds(t.TopLogprob, token_ids, floats, st.binary(max_size=4)), max_size=3).map(
        tuple
    ),
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
        *(totals(WorkerTotals), totals(SpeculationTotals)),
        st.lists(counts).map(tuple),
    )
)
def test_process_status_round_trip(process):
    assert process_from_proto(over_the_wire(process_to_proto(process))) == process


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
            with pytest.raises(InvalidArgumentError) as caught:
                convert.request_from_proto(over_the_wire(message))
            assert caught.value.field == field


@pytest.mark.parametrize("field", ["verification", "drafter"])
def test_request_enum_value_of_a_later_version_is_refused(field):
    later = gen.GenerateRequest(text="Hi")
    # proto3 enums are open: the wire may carry any number.
    number = gen.GenerateRequest.DESCRIPTOR.fields_by_name[field].number
    later.MergeFromString(bytes([number << 3, 99]))
    with pytest.raises(InvalidArgumentError) as caught:
        convert.request_from_proto(later)
    assert caught.value.field == field


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
