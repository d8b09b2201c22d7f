"""The blocking client: the same answers from plain code, from threads and from inside a running loop."""

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gammaray import CancelledError, Client, InvalidArgumentError, ResourceExhaustedError
from tests.support.sdk_helpers import (
    NO_RETRY,
    PROCESSES,
    WAIT_S,
    ScriptedService,
    answer,
    endless,
    last,
    numbered,
    piece,
    refuse,
    serve_in_thread,
    silent,
)


def test_sync_calls_answer():
    chunks = [piece("a"), last("b")]
    service = ScriptedService(answer(*chunks))
    with serve_in_thread(service) as address, Client(address, api_key="secret") as client:
        assert client.complete("Hi", gamma=0).text == "ab"
        assert list(client.generate("Hi", seed=1)) == numbered(chunks)
        assert client.status() == PROCESSES
        assert client.wait_ready(5) == PROCESSES
    assert service.requests[0].gamma.fixed == 0
    assert service.metadata[0]["authorization"] == "Bearer secret"


async def test_sync_client_inside_a_running_loop_answers():
    with serve_in_thread(ScriptedService(answer(piece("a"), last("b")))) as address:
        with Client(address) as client:
            assert asyncio.get_running_loop().is_running()
            assert client.complete("Hi").text == "ab"
            assert [chunk.text for chunk in client.generate("Hi")] == ["a", "b"]


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
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)


def test_sync_errors_are_those_of_the_async_client():
    service = ScriptedService(refuse(ResourceExhaustedError("full", 3.0)))
    with serve_in_thread(service) as address, Client(address, retry=NO_RETRY) as client:
        with pytest.raises(ResourceExhaustedError) as caught:
            client.complete("Hi")
        with pytest.raises(InvalidArgumentError):
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
        ended = subprocess.run(
            [sys.executable, "-c", script, address], capture_output=True, text=True, timeout=60
        )
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
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "1\n", ended.stderr


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
