"""The gRPC API over a scripted orchestrator: what a call yields, and how it ends."""

import grpc
import pytest

from gammaray.errors import DeadlineExceededError, InvalidArgumentError
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.wire.convert import chunk_from_proto
from orchestrator.api.grpc_handlers import Unread
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.text.cpu_threads import INLINE_NUMBERS
from tests.support.grpc_helpers import Context
from tests.support.surface_helpers import ScriptedBackend


async def generate(backend, **fields):
    context = Context()
    responses = GenerationServicer(backend).generate(pb.GenerateRequest(**fields), context)
    return [chunk_from_proto(response) async for response in responses], context


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


async def test_generate_unparsable_request_is_rejected():
    context, servicer = Context(), GenerationServicer(ScriptedBackend())
    request = Unread(pb.GenerateRequest.DESCRIPTOR.full_name, b"\x12\x02\xff\xfe")
    assert [response async for response in servicer.generate(request, context)] == []
    assert (context.code, context.error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request")


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
    def before(request, number):
        if number == 1:
            raise error

    chunks, context = await generate(ScriptedBackend(before), text="x")
    assert [chunk.text for chunk in chunks] == ["caf"]
    assert context.code is code
    assert "secret" not in context.details
