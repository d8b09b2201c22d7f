"""Errors of a server keep their class, and only temporary ones are retried."""

import asyncio
import time

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import status_pb2

from gammaray import (
    AsyncClient,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    GammarayError,
    InternalError,
    InvalidArgumentError,
    ModelChangedError,
    NotFoundError,
    ResourceExhaustedError,
    RetryPolicy,
    UnauthenticatedError,
    UnavailableError,
)
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1.generation_service_pb2_grpc import GenerationServiceServicer
from gammaray.wire.rpc_errors import DETAILS_KEY, error_to_status
from orchestrator.launcher.preflight import free_ports
from tests.support.sdk_helpers import (
    FAST_RETRY,
    NO_RETRY,
    ScriptedService,
    answer,
    last,
    piece,
    refuse,
    serve,
)

ERRORS = [
    InvalidArgumentError("sampling.top_p", 1.5, "a number in (0, 1]"),
    InvalidArgumentError("prompt", "got x, allowed: y", "something else"),
    InvalidArgumentError("prompt", "é" * 5000, "at most\n4096 tokens"),
    NotFoundError("no model named x"),
    UnauthenticatedError("no valid API key"),
    ResourceExhaustedError("too many requests in flight", retry_after_s=2.25),
    FailedPreconditionError("epoch 3 is stale"),
    ModelChangedError("s", "a" * 64 + "/float32", ["b" * 64 + "/float32", ""]),
    DeadlineExceededError("verification took longer than 60 s"),
    UnavailableError("no target worker"),
    CancelledError("the session was deleted"),
    InternalError("internal error (ZeroDivisionError)"),
]
IDS = [f"{type(error).__name__}-{number}" for number, error in enumerate(ERRORS)]


class RawFailure(GenerationServiceServicer):
    """Ends every call with a status and trailing metadata of the test's choice."""

    def __init__(self, code, details="", trailing=()):
        self.failure = (code, details, trailing)

    async def GetStatus(self, request, context):
        await context.abort(*self.failure)

    async def Generate(self, request, context):
        yield pb.GenerateResponse()


async def failed_status(code, details="", trailing=()):
    async with serve(RawFailure(code, details, trailing)) as address:
        async with AsyncClient(address, retry=NO_RETRY) as client:
            with pytest.raises(GammarayError) as caught:
                await client.status()
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=IDS)
@pytest.mark.parametrize("chunks", [(), (piece("first"),)], ids=["at once", "after a chunk"])
async def test_error_of_each_class_is_raised_by_the_client(error, chunks):
    async with serve(ScriptedService(refuse(error, *chunks))) as address:
        async with AsyncClient(address, retry=NO_RETRY) as client:
            with pytest.raises(GammarayError) as caught:
                await client.complete("Hi")
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


async def test_error_plain_invalid_argument_keeps_the_message():
    error = await failed_status(grpc.StatusCode.INVALID_ARGUMENT, "top_p is silly")
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.got) == ("request", "top_p is silly")


@pytest.mark.parametrize(
    ("code", "cls"),
    # Which model a session had is in the details alone.
    [(error.status, type(error)) for error in ERRORS[3:] if type(error) is not ModelChangedError],
    ids=lambda value: getattr(value, "name", None),
)
async def test_error_plain_status_maps_to_its_class(code, cls):
    error = await failed_status(code, "why")
    assert type(error) is cls
    assert str(error) == "why"


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.DATA_LOSS])
async def test_error_status_without_a_class_names_its_code(code):
    error = await failed_status(code, "why")
    assert type(error) is GammarayError
    assert str(error) == f"{code.name}: why"


@pytest.mark.parametrize(
    "trailer",
    [
        b"\xff\xff\xff",
        error_to_status(UnavailableError("another")).SerializeToString(),
        status_pb2.Status(
            code=5,
            message="why",
            details=[Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff")],
        ).SerializeToString(),
    ],
    ids=["no status", "contradicts the code", "malformed detail"],
)
async def test_error_malformed_details_fall_back_to_the_plain_status(trailer):
    error = await failed_status(grpc.StatusCode.NOT_FOUND, "why", ((DETAILS_KEY, trailer),))
    assert type(error) is NotFoundError
    assert str(error) == "why"


@pytest.mark.parametrize("error", [UnavailableError("busy"), CancelledError("replica died")])
async def test_retry_failure_before_the_first_chunk_is_tried_again(error):
    async def third_time_lucky(request, attempt):
        if attempt < 2:
            raise error
        yield last("done")

    service = ScriptedService(third_time_lucky)
    async with serve(service) as address, AsyncClient(address, retry=FAST_RETRY) as client:
        completion = await client.complete("Hi", seed=4)
    assert completion.text == "done"
    assert len(service.requests) == 3
    first, second, third = service.requests
    assert not first.HasField("resume_from")
    assert second == third
    second.ClearField("resume_from")  # 0: the first call may have begun the session, or not
    assert first == second


async def test_retry_ends_before_the_deadline_would_pass():
    service = ScriptedService(refuse(UnavailableError("busy")))
    patient = RetryPolicy(max_attempts=100, initial_delay_s=100, max_delay_s=100)
    async with serve(service) as address, AsyncClient(address, retry=patient) as client:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="busy"):
            await client.complete("Hi", timeout_s=30)
        assert time.monotonic() - started < 30
    assert len(service.requests) == 1


async def test_retry_status_is_tried_again_too():
    def second_time_lucky(attempt):
        if attempt == 0:
            raise UnavailableError("busy")
        return []

    async with serve(ScriptedService(status=second_time_lucky)) as address:
        async with AsyncClient(address, retry=FAST_RETRY) as client:
            assert await client.status() == []


async def test_retry_reaches_a_server_that_starts_late():
    [port] = free_ports("127.0.0.1", 1)
    policy = RetryPolicy(max_attempts=500, initial_delay_s=0.1, max_delay_s=0.1)
    async with AsyncClient(f"127.0.0.1:{port}", retry=policy) as client:
        task = asyncio.create_task(client.complete("Hi"))
        await asyncio.sleep(0.3)
        assert not task.done()
        async with serve(ScriptedService(answer(last("late"))), port):
            assert (await task).text == "late"


def test_retry_policy_delays_grow_up_to_the_bound():
    policy = RetryPolicy(initial_delay_s=1, max_delay_s=4)
    for attempt, bound in enumerate([1, 2, 4, 4]):
        delays = [policy.delay_s(attempt) for _ in range(20)]
        assert bound / 2 <= min(delays) <= max(delays) <= bound
        assert len(set(delays)) > 1
