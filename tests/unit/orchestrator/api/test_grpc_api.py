"""The gRPC API over a scripted orchestrator: parsing of requests, what a call yields, and how it ends."""

from types import SimpleNamespace
from unittest.mock import Mock

import grpc
import pytest

from gammaray.errors import DeadlineExceededError, InvalidArgumentError
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import generation_service_pb2_grpc as pb_grpc
from orchestrator.api.grpc_handlers import add_generation_service, read
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.text.cpu_threads import INLINE_NUMBERS
from tests.support.grpc_helpers import Context, generate
from tests.support.surface_helpers import ScriptedBackend


async def test_generate_returns_thousands_of_prompt_logprobs():
    prompt = list(range(1, INLINE_NUMBERS))
    request = {"token_ids": pb.TokenIds(ids=prompt), "num_prompt_logprobs": 2}
    (first, *_), context = await generate(ScriptedBackend(), **request)
    assert context.code is None
    reported = first.prompt_logprobs
    assert list(reported.token_ids) == prompt
    assert len(reported.logprobs) == len(prompt) - 1
    assert len(reported.top_logprobs) == 2 * (len(prompt) - 1)
    assert reported.logprobs[-1] == -(len(prompt) - 1) / 10


async def test_generate_bad_field_is_named_in_the_details():
    chunks, context = await generate(ScriptedBackend(), text="x", sampling={"top_p": 0.0})
    assert chunks == []
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(context.error, InvalidArgumentError)
    assert context.error.field == "top_p"
    assert context.details == str(context.error)


async def test_generate_error_details_fit_the_header_limit():
    _, context = await generate(ScriptedBackend(), text="x", model="é" * 100_000)
    assert context.code is grpc.StatusCode.NOT_FOUND
    assert len(context.details.encode()) < 1100
    assert sum(len(value) for _, value in context.trailers) < 1200


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineExceededError("slow"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (ZeroDivisionError("secret"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_generate_failing_midway_keeps_earlier_chunks(error, code):
    chunks, context = await generate(ScriptedBackend(Mock(side_effect=[None, error])), text="x")
    assert [chunk.text for chunk in chunks] == ["caf"]
    assert context.code is code
    assert "secret" not in context.details


SERVICE = pb.DESCRIPTOR.services_by_name["GenerationService"]


def registered(add):
    """Return the handlers that `add` registers, by path."""
    methods, added = {method.name: None for method in SERVICE.methods}, []
    server = SimpleNamespace(
        add_generic_rpc_handlers=added.extend, add_registered_method_handlers=lambda name, handlers: None
    )
    add(SimpleNamespace(**methods), server)
    calls = {name: SimpleNamespace(method=f"/{SERVICE.full_name}/{name}") for name in methods}
    return {name: added[0].service(call) for name, call in calls.items()}


def unread(data):
    return registered(add_generation_service)["Generate"].request_deserializer(data)


def test_handlers_are_those_of_the_generated_function():
    ours = registered(add_generation_service)
    generated = registered(pb_grpc.add_GenerationServiceServicer_to_server)
    assert ours.keys() == generated.keys()
    for name, handler in generated.items():
        assert handler.request_streaming is ours[name].request_streaming is False
        assert handler.response_streaming is ours[name].response_streaming


@pytest.mark.parametrize(
    "data", [b"\x12\x02\xff\xfe", b"\x12\x01x\x32\x01\xff", b"\xff\xff\xff", b"\x12\x05ab"]
)
@pytest.mark.parametrize("is_large", [False, True])
async def test_unreadable_request_is_refused(data, is_large):
    salt = pb.GenerateRequest(cache_salt="x" * 100_000).SerializeToString() if is_large else b""
    context, servicer = Context(), GenerationServicer(ScriptedBackend())
    assert [response async for response in servicer.generate(unread(salt + data), context)] == []
    assert (context.code, context.error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")


def unpacked(number, count):
    """Return a repeated field of ones, each a field of its own on the wire."""
    return bytes([number << 3, 1]) * count


FIELDS, NUMBERS = (
    "request: got more than 65536 fields",
    "request: got more than 2097152 numbers in packed lists",
)
TWO_LISTS = {"token_ids": {"ids": [200] * 2**20}, "stop_token_ids": [3] * (2**20 + 1)}
HUGE = {
    "biases": ({"sampling": {"logit_bias": dict.fromkeys(range(30_000), 1.0)}}, b"", FIELDS),
    "ids of two lists": (TWO_LISTS, b"", NUMBERS),
    "fields": ({}, unpacked(7, 70_000), FIELDS),
    "unknown fields": ({}, b"\xf8\x07\x01" * 70_000, FIELDS),
}


@pytest.mark.parametrize(("fields", "more", "message"), HUGE.values(), ids=HUGE)
async def test_request_of_too_many_fields_is_refused_before_it_is_converted(fields, more, message):
    converted = []
    with pytest.raises(InvalidArgumentError, match=f"^{message}"):
        await read(unread(pb.GenerateRequest(**fields).SerializeToString() + more), converted.append)
    assert not converted


async def test_readable_request_is_read_and_its_unpacked_ids_are():
    request = pb.GenerateRequest(text="caf\u00e9" * 10_000, sampling={"logit_bias": {7: 1.5}})
    found = await read(unread(request.SerializeToString() + unpacked(7, 20_000)), lambda message: message)
    request.stop_token_ids.extend([1] * 20_000)
    assert found == request
