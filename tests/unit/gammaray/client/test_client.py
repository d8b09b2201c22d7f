"""AsyncClient and Client against a gRPC server: completions, cancellation, deadlines, errors and retries."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest.mock import Mock

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import status_pb2

from gammaray import AsyncClient, Client, ProcessStatus, RetryPolicy, errors
from gammaray.wire.rpc_errors import DETAILS_KEY, error_to_status
from orchestrator.launcher.preflight import free_ports
from tests.support.own_process import run_code
from tests.support.sdk_helpers import (
    FAST_RETRY,
    NO_RETRY,
    PROCESSES,
    WAIT_S,
    ScriptedService,
    answer,
    endless,
    happens,
    last,
    numbered,
    piece,
    refuse,
    serve,
    serve_in_thread,
    silent,
    token,
)


async def test_server_of_this_machine_is_called_past_the_proxy(monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with serve(ScriptedService()) as address, AsyncClient(address, retry=NO_RETRY) as client:
        assert await client.status() == PROCESSES


async def test_calls_send_their_timeout():
    service = ScriptedService()
    async with serve(service) as address, AsyncClient(address, timeout_s=20) as client:
        await client.complete("Hi")
        await client.complete("Hi", timeout_s=2.5)
        await client.complete("Hi", timeout_s=1e9)
    reported = [int(call["gammaray-timeout-ms"]) for call in service.metadata]
    assert 19_000 < reported[0] <= 20_000
    assert 1500 < reported[1] <= 2500
    assert reported[2] == 7 * 24 * 3600 * 1000


async def test_generate_message_above_grpcs_default_limit_arrives():
    text = "x" * (5 * 2**20)
    async with serve(ScriptedService(answer(last(text, token("x"))))) as address:
        async with AsyncClient(address) as client:
            assert (await client.complete("Hi")).text == text


@pytest.mark.parametrize("behaviour", [endless, silent], ids=["between chunks", "before the first"])
async def test_generate_cancelled_task_cancels_on_the_server(behaviour):
    service = ScriptedService(behaviour)
    async with serve(service) as address, AsyncClient(address) as client:
        task = asyncio.create_task(client.complete("Hi"))
        assert await happens(service.arrived)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await happens(service.cancelled)


@dataclass(frozen=True)
class ToldRetry(RetryPolicy):
    """Tells when a call waits for its next attempt."""

    waits: asyncio.Event = field(default_factory=asyncio.Event)

    def delay_s(self, attempt):
        self.waits.set()
        return 0.1


@pytest.mark.parametrize("method", ["complete", "status", "wait_ready"])
async def test_client_that_is_closed_while_a_call_waits_to_retry_raises_cancelled(method):
    retry = ToldRetry()
    client = AsyncClient("127.0.0.1:1", retry=retry)
    call = asyncio.create_task(client.complete("Hi") if method == "complete" else getattr(client, method)())
    await asyncio.wait_for(retry.waits.wait(), 30)
    await client.close()
    with pytest.raises(errors.CancelledError, match="the client was closed"):
        await asyncio.wait_for(call, 30)


@pytest.mark.parametrize("per_call", [True, False], ids=["of the call", "of the client"])
async def test_generate_deadline_ends_the_call_on_both_sides(per_call):
    service = ScriptedService(silent)
    client_s, call_s = (600.0, 1.0) if per_call else (1.0, None)
    async with serve(service) as address, AsyncClient(address, timeout_s=client_s) as client:
        await client.status()  # the time is not for connecting
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError):
            await client.complete("Hi", timeout_s=call_s)
        assert 0.9 <= time.monotonic() - started < 60
        assert await happens(service.cancelled)


async def test_wait_ready_cluster_that_starts_returns_when_a_target_is_healthy():
    looks = [[ProcessStatus("target", 1, "", "demo", is_healthy, 0)] for is_healthy in (False, True)]
    starting = Mock(side_effect=[errors.UnavailableError("no replica yet"), *looks])
    service = ScriptedService(status=starting)
    async with serve(service) as address, AsyncClient(address, retry=NO_RETRY) as client:
        processes = await client.wait_ready(60)
    assert [process.healthy for process in processes] == [True]
    assert service.num_status_calls == 3


async def test_wait_ready_missing_role_times_out_and_names_it():
    async with serve(ScriptedService()) as address, AsyncClient(address) as client:
        with pytest.raises(errors.DeadlineExceededError, match=r"not ready after 1 s: no healthy draft"):
            await client.wait_ready(1, roles=("target", "draft"))


async def test_wait_ready_without_a_server_times_out():
    async with AsyncClient("127.0.0.1:1") as client:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceededError, match="not ready"):
            await client.wait_ready(0.3)
        assert time.monotonic() - started < 20


async def test_wait_ready_refused_key_raises_at_once():
    refuse_key = Mock(side_effect=errors.UnauthenticatedError("no valid API key"))
    async with serve(ScriptedService(status=refuse_key)) as address, AsyncClient(address) as client:
        with pytest.raises(errors.UnauthenticatedError, match="no valid API key"):
            await client.wait_ready(10)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"address": ""}, "address"),
        ({"api_key": ""}, "api_key"),
        ({"api_key": "a\nb"}, "api_key"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"timeout_s": "10"}, "timeout_s"),
    ],
)
def test_client_bad_argument_raises(arguments, field):
    with pytest.raises(errors.InvalidArgumentError, match=f"^{field}: got"):
        AsyncClient(**{"address": "127.0.0.1:9000", **arguments})


@pytest.mark.slow
async def test_status_that_a_proxy_never_passes_on_is_asked_for_again():
    service = ScriptedService(num_hung_status_calls=1)
    async with serve(service) as address, AsyncClient(address) as client:
        assert await client.status(timeout_s=4) == PROCESSES
    assert service.num_status_calls == 2


ERRORS = [
    errors.InvalidArgumentError("sampling.top_p", 1.5, "a number in (0, 1]"),
    errors.InvalidArgumentError("prompt", "got x, allowed: y", "something else"),
    errors.InvalidArgumentError("prompt", "é" * 5000, "at most\n4096 tokens"),
    errors.NotFoundError("no model named x"),
    errors.UnauthenticatedError("no valid API key"),
    errors.ResourceExhaustedError("too many requests in flight", retry_after_s=2.25),
    errors.FailedPreconditionError("epoch 3 is stale"),
    errors.ModelChangedError("s", "a" * 64 + "/float32", ["b" * 64 + "/float32", ""]),
    errors.DeadlineExceededError("verification took longer than 60 s"),
    errors.UnavailableError("no target worker"),
    errors.CancelledError("the session was deleted"),
    errors.InternalError("internal error (ZeroDivisionError)"),
]
IDS = [f"{type(error).__name__}-{number}" for number, error in enumerate(ERRORS)]


async def failed_status(code, details="", trailing=()):
    """Return the error of a call that a server ends with a status and trailing metadata."""

    async def end(request, context):
        await context.abort(code, details, trailing)

    async with serve(Mock(GetStatus=end)) as address:
        async with AsyncClient(address, retry=NO_RETRY) as client:
            with pytest.raises(errors.GammarayError) as caught:
                await client.status()
    return caught.value


@pytest.mark.parametrize("error", ERRORS, ids=IDS)
@pytest.mark.parametrize("chunks", [(), (piece("first"),)], ids=["at once", "after a chunk"])
async def test_error_of_each_class_is_raised_by_the_client(error, chunks):
    async with serve(ScriptedService(refuse(error, *chunks))) as address:
        async with AsyncClient(address, retry=NO_RETRY) as client:
            with pytest.raises(errors.GammarayError) as caught:
                await client.complete("Hi")
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)


async def test_error_plain_invalid_argument_keeps_the_message():
    error = await failed_status(grpc.StatusCode.INVALID_ARGUMENT, "top_p is silly")
    assert isinstance(error, errors.InvalidArgumentError)
    assert (error.field, error.got) == ("request", "top_p is silly")


async def test_error_plain_status_maps_to_its_class_or_names_its_code():
    # Which model a session had is in the details alone.
    plain = [error for error in ERRORS[3:] if type(error) is not errors.ModelChangedError]
    for code, cls, text in (
        *((error.status, type(error), "why") for error in plain),
        (grpc.StatusCode.DATA_LOSS, errors.GammarayError, "DATA_LOSS: why"),
    ):
        error = await failed_status(code, "why")
        assert (type(error), str(error)) == (cls, text)


BAD_DETAIL = Any(type_url="type.googleapis.com/google.rpc.BadRequest", value=b"\xff")
TRAILERS = {
    "no status": b"\xff\xff\xff",
    "contradicts the code": error_to_status(errors.UnavailableError("another")).SerializeToString(),
    "malformed": status_pb2.Status(code=5, message="why", details=[BAD_DETAIL]).SerializeToString(),
}


@pytest.mark.parametrize("trailer", TRAILERS.values(), ids=TRAILERS)
async def test_error_malformed_details_fall_back_to_the_plain_status(trailer):
    error = await failed_status(grpc.StatusCode.NOT_FOUND, "why", ((DETAILS_KEY, trailer),))
    assert type(error) is errors.NotFoundError
    assert str(error) == "why"


@pytest.mark.parametrize("error", [errors.UnavailableError("busy"), errors.CancelledError("replica died")])
async def test_retry_failure_before_the_first_chunk_is_tried_again(error):
    async def third_time_lucky(request, attempt):
        if attempt < 2:
            raise error
        yield last("done")

    service = ScriptedService(third_time_lucky, Mock(side_effect=[error, []]))
    async with serve(service) as address, AsyncClient(address, retry=FAST_RETRY) as client:
        completion = await client.complete("Hi", seed=4)
        assert await client.status() == []
    assert completion.text == "done"
    assert len(service.requests) == 3
    first, second, third = service.requests
    assert not first.HasField("resume_from")
    assert second == third
    second.ClearField("resume_from")  # 0: the first call may have begun the session, or not
    assert first == second


async def test_retry_ends_before_the_deadline_would_pass():
    service = ScriptedService(refuse(errors.UnavailableError("busy")))
    patient = RetryPolicy(max_attempts=100, initial_delay_s=100, max_delay_s=100)
    async with serve(service) as address, AsyncClient(address, retry=patient) as client:
        started = time.monotonic()
        with pytest.raises(errors.UnavailableError, match="busy"):
            await client.complete("Hi", timeout_s=30)
        assert time.monotonic() - started < 30
    assert len(service.requests) == 1


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


async def test_sync_calls_answer_also_inside_a_running_loop():
    chunks = [piece("a"), last("b")]
    service = ScriptedService(answer(*chunks))
    with serve_in_thread(service) as address, Client(address, api_key="secret") as client:
        assert client.complete("Hi", gamma=0).text == "ab"
        assert list(client.generate("Hi", seed=1)) == numbered(chunks)
        assert client.status() == PROCESSES
        assert client.wait_ready(5) == PROCESSES
    assert service.requests[0].gamma.fixed == 0
    assert service.metadata[0]["authorization"] == "Bearer secret"


def test_sync_generate_break_cancels_on_the_server():
    service = ScriptedService(endless)
    with serve_in_thread(service) as address, Client(address) as client:
        for _ in client.generate("Hi"):
            break
        assert service.cancelled.wait(WAIT_S)


def test_sync_close_ends_a_stream_that_runs():
    service = ScriptedService(endless)
    with serve_in_thread(service) as address:
        client = Client(address)
        chunks = client.generate("Hi")
        next(chunks)
        client.close()
        assert service.cancelled.wait(WAIT_S)
        with pytest.raises(RuntimeError, match="closed"):
            next(chunks)


def test_sync_close_from_another_thread_wakes_a_waiting_call():
    service = ScriptedService(silent)
    with serve_in_thread(service) as address, ThreadPoolExecutor(1) as pool:
        client = Client(address)
        waiting = pool.submit(client.complete, "Hi")
        assert service.arrived.wait(WAIT_S)
        client.close()
        with pytest.raises(errors.CancelledError):
            waiting.result(WAIT_S)


def test_sync_errors_are_those_of_the_async_client():
    service = ScriptedService(refuse(errors.ResourceExhaustedError("full", 3.0)))
    with serve_in_thread(service) as address, Client(address, retry=NO_RETRY) as client:
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            client.complete("Hi")
        with pytest.raises(errors.InvalidArgumentError):
            client.generate("")
    assert caught.value.retry_after_s == 3.0


def test_sync_client_is_shared_by_threads():
    async def echo(request, attempt):
        for character in request.text:
            yield piece(character)
        yield last("")

    prompts = [f"prompt {number}" for number in range(12)]
    with serve_in_thread(ScriptedService(echo)) as address, Client(address) as client:
        with ThreadPoolExecutor(4) as pool:
            completions = list(pool.map(client.complete, prompts))
    assert [completion.text for completion in completions] == prompts


def test_sync_clients_that_open_and_close_in_threads_print_nothing():
    """With a loop for each, grpc.aio printed errors about closed loops."""
    script = (
        "import gammaray, sys\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def ask(_):\n"
        "    with gammaray.Client(sys.argv[1]) as client: return client.complete('Hi').text\n"
        "with ThreadPoolExecutor(8) as pool: print(set(pool.map(ask, range(200))))"
    )
    with serve_in_thread(ScriptedService(answer(piece("a"), last("b")))) as address:
        ended = run_code(script, address)
    assert (ended.stdout, ended.stderr) == ("{'ab'}\n", "")


def test_sync_client_of_a_forked_process_has_a_thread():
    script = (
        "import gammaray, os, threading\n"
        "gammaray.Client('127.0.0.1:1')\n"
        "if os.fork() == 0:\n"
        "    gammaray.Client('127.0.0.1:1')\n"
        "    os._exit([thread.name for thread in threading.enumerate()].count('gammaray-client'))\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))"
    )
    assert run_code(script).stdout == "1\n"


@pytest.mark.parametrize("behaviour", [endless, silent], ids=["between chunks", "before the first"])
def test_sync_interrupt_cancels_on_the_server_and_raises(behaviour):
    service = ScriptedService(behaviour)
    # A shell starts background jobs with SIGINT ignored, which a child inherits.
    script = (
        "import gammaray, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for chunk in gammaray.Client(sys.argv[1]).generate('Hi'): pass"
    )
    with serve_in_thread(service) as address:
        process = subprocess.Popen([sys.executable, "-c", script, address], stderr=subprocess.PIPE, text=True)
        try:
            assert service.arrived.wait(WAIT_S)
            os.kill(process.pid, signal.SIGINT)
            _, stderr = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
        assert service.cancelled.wait(WAIT_S)
    assert process.returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "RuntimeError" not in stderr
