"""One cluster for `make test`: what every change must keep; the last tests kill its processes."""

import asyncio
import signal
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Literal

import httpx
import openai
import psutil
import pytest
from pydantic import BaseModel, Field

from gammaray import (
    AsyncClient,
    Client,
    FinishReason,
    GammarayError,
    NotFoundError,
    RetryPolicy,
    SessionState,
)
from gammaray.receipts.keys import read_receipt_keys, rotate
from gammaray.receipts.receipt import SignedReceipt
from orchestrator.launcher.reaper import MARK, runs
from services.receipts.check import ReceiptChecker
from tests.chaos.clients import hear_all
from tests.chaos.load import Heard, Said
from tests.support.cluster.cluster_helpers import (
    STOP_TIMEOUT_S,
    Cluster,
    eventually,
    is_without_model,
    running_cluster,
    undisturbed,
    wait_until_gone,
)

pytestmark = pytest.mark.timeout(900)

PROMPT = "def read_lines(path):\n"
MESSAGES = [{"role": "user", "content": "What is the weather in Oslo?"}]
NUM_TOKENS, NUM_HTTP_TOKENS = 250, 600
"""So many that a stream still runs when it is disturbed, however late that is on a busy machine."""

RECOVERY_S = 240.0
"""For a replica to be noticed as dead and replaced: its process alone takes ten seconds to start on a quiet
machine, and over a minute on a busy one."""

PATIENT = RetryPolicy(resume_s=RECOVERY_S)


class Weather(BaseModel):
    """What is asked for, and what the tool takes."""

    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


@pytest.fixture(scope="module")
def receipt_keys(tmp_path_factory):
    rotate(path := tmp_path_factory.mktemp("keys") / "receipts.json")
    return path


@pytest.fixture(scope="module")
def smoke(receipt_keys):
    with pytest.MonkeyPatch.context() as environment:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            environment.setenv(name, "http://127.0.0.1:9")  # no proxy: the cluster's own calls use none
        with running_cluster("--orchestrators", "2", "--receipt-keys-file", str(receipt_keys)) as cluster:
            environment.undo()
            yield cluster


def two_orchestrators(cluster: Cluster) -> list[psutil.Process]:
    """Wait until the cluster has recovered from the previous test, and return its two orchestrators.

    Call it before a stream begins: on a busy machine it may take longer than the stream.
    """
    found: list[set[int]] = []

    def have_both_settled() -> bool:
        found.clear()
        with suppress(GammarayError, psutil.Error):
            for _ in range(4):  # a new connection goes to the next one
                found.append({p.pid for p in cluster.status() if p.role == "orchestrator" and p.healthy})
            is_same = len(found[0]) == 2 and found.count(found[0]) == len(found)
            return is_same and all(runs(psutil.Process(pid)) for pid in found[0])
        return False

    assert eventually(have_both_settled, RECOVERY_S), found
    return [psutil.Process(pid) for pid in found[0]]


def kill(processes: list[psutil.Process], number: int) -> None:
    """Send a signal to processes; one may have been replaced in the meantime."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def listens_beyond_loopback(process: psutil.Process) -> list[int]:
    """Return the TCP ports of a process that other machines can reach; none if it has ended."""
    with suppress(psutil.Error):
        sockets = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        hosts = [(ip_address(socket.ip.removeprefix("::ffff:")), socket.port) for socket in sockets]
        return [port for host, port in hosts if not host.is_loopback]
    return []


def test_only_the_documented_ports_listen_beyond_loopback(smoke):
    """Serve has no setting for them (docs/security.md); no port of Ray is among them."""
    replicas = "ray::ServeReplica", 2
    documented = {replicas, ("haproxy", 2), ("ray::ProxyActor", 1)}
    kinds = [kind for kind, _ in documented]

    def found() -> set[tuple[str, int]]:
        return {
            (next((kind for kind in kinds if kind in command[0]), command[0]), len(ports))
            for process, command in smoke.commands()
            if (ports := listens_beyond_loopback(process))
        }

    # Serve replaces HAProxy's process when it adds a replica, and its sockets pass to the new one one by one.
    assert eventually(lambda: replicas in found() <= documented), found()


def test_torch_is_loaded_by_workers_only(smoke):
    """It takes seconds of a start, and 130 MB of each process that imports it."""

    def has_torch(process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return any("libtorch" in library.path for library in process.memory_maps())
        return False

    names = {command[0] for process, command in smoke.commands() if has_torch(process)}
    assert sorted(name.rpartition(":")[2] for name in names) == ["DraftWorker", "TargetWorker"]


def test_json_schema_and_tool_call_are_valid(smoke):
    options = {"model": "", "messages": MESSAGES, "seed": 1, "max_tokens": 128}
    with smoke.openai() as http:
        answer = http.chat.completions.parse(**options, response_format=Weather)
        assert isinstance(answer.choices[0].message.parsed, Weather)
        tool = openai.pydantic_function_tool(Weather)
        named = {"type": "function", "function": {"name": "Weather"}}
        (choice,) = http.chat.completions.parse(**options, tools=[tool], tool_choice=named).choices
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls"
        assert isinstance(call.function.parsed_arguments, Weather)
        with http.chat.completions.stream(**options, tools=[tool], tool_choice=named) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        assert "".join(delta.arguments_delta for delta in deltas) == call.function.arguments


async def test_session_calls_reach_any_orchestrator(smoke):
    await asyncio.to_thread(two_orchestrators, smoke)
    async with AsyncClient(smoke.grpc, retry=PATIENT) as client:
        # Slowly, so that it still runs when it is asked for and cancelled.
        stream = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, session_id="called", gamma=0)
        first = await anext(stream)
        info, tokens = await client.get_session("called")
        assert info.state is SessionState.RUNNING
        assert [token.token_id for token in tokens][: len(first.tokens)] == [t.token_id for t in first.tokens]
        assert "called" in [info.session_id for info in await client.list_sessions()]
        assert (await client.cancel("called")).finish_reason is FinishReason.CANCELLED
        assert [chunk async for chunk in stream][-1].finish_reason is FinishReason.CANCELLED
        again = await client.complete("more", session_id="called", turn=1, max_tokens=5, ignore_eos=True)
        assert len(again.tokens) == 5
        assert [chunk.turn async for chunk in client.resume("called", turn=1)] == [1]
        assert await client.delete_session("called")
        with pytest.raises(NotFoundError):
            await client.get_session("called")


def test_stream_survives_the_loss_of_the_draft_worker_which_is_replaced(smoke):
    options = {"max_tokens": NUM_TOKENS, "seed": 3, "ignore_eos": True, "gamma": 4}
    with Client(smoke.grpc) as client:
        expected = [token.token_id for token in client.complete(PROMPT, **{**options, "gamma": 0}).tokens]
        undisturbed(lambda: client.complete(PROMPT, **options), is_without_model)
        (drafter,) = [process for process in client.status() if process.role == "draft"]
        stream = client.generate(PROMPT, **options)
        tokens = list(next(stream).tokens)
        kill([psutil.Process(drafter.pid)], signal.SIGKILL)
        tokens += [token for chunk in stream for token in chunk.tokens]
        assert [token.token_id for token in tokens] == expected

        def is_replaced() -> bool:
            found = [process for process in client.status(timeout_s=30) if process.role == "draft"]
            serving = [process for process in found if process.healthy and process.pid != drafter.pid]
            return bool(serving) and not is_without_model(client.complete(PROMPT, **options))

        assert eventually(is_replaced, RECOVERY_S)


@pytest.mark.kills
@pytest.mark.parametrize(
    ("number", "path", "prompt"),
    [
        pytest.param(signal.SIGKILL, "/v1/completions", {"prompt": PROMPT}, id="killed"),
        pytest.param(signal.SIGTERM, "/v1/chat/completions", {"messages": MESSAGES}, id="stopped"),
    ],
)
async def test_streams_survive_the_loss_of_every_orchestrator(smoke, receipt_keys, number, path, prompt):
    """After SIGTERM, with the target killed as well; the receipts of the resumed streams are valid."""
    serving = await asyncio.to_thread(two_orchestrators, smoke)
    body = {**prompt, "max_tokens": NUM_HTTP_TOKENS, "ignore_eos": True, "seed": 5}
    temperatures, receipts = (0.0, 1.0), list[str]()
    arrivals: dict[object, list[float]] = {name: [] for name in (*temperatures, "http")}

    async with (
        AsyncClient(smoke.grpc, retry=PATIENT) as client,
        httpx.AsyncClient(base_url=smoke.http, timeout=60) as http,
    ):

        async def sdk_stream(temperature: float) -> tuple[list[int], str, int]:
            """Return token ids, text and how often the session changed hands, plus one."""
            tokens, text, name = [], "", ""
            options = {"temperature": temperature, "seed": 7, "max_tokens": NUM_TOKENS, "ignore_eos": True}
            async for chunk in client.generate(PROMPT, **options, receipt=True):
                assert chunk.offset == len(tokens)
                tokens += [token.token_id for token in chunk.tokens]
                text, name = text + chunk.text, chunk.session_id
                arrivals[temperature].append(time.monotonic())
            receipts.append(chunk.receipt)
            session, _ = await client.get_session(name, timeout_s=60)
            return tokens, text, session.epoch

        async def http_stream() -> tuple[Said, int]:
            """Return the same, with the number of connections."""
            heard = Heard(arrivals=arrivals["http"])
            connections = await asyncio.wait_for(hear_all(http, body, heard, path), RECOVERY_S)
            return heard.said, connections

        async def all_streams() -> tuple[list[tuple[list[int], str, int]], tuple[Said, int]]:
            *over_sdk, over_http = await asyncio.gather(*map(sdk_stream, temperatures), http_stream())
            return over_sdk, over_http

        async def all_begun() -> None:
            while min(map(len, arrivals.values())) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

        targets = [psutil.Process(one.pid) for one in await client.status() if one.role == "target"]
        whole, (over_http, connections) = await all_streams()
        assert (connections, len(over_http.token_ids)) == (1, NUM_HTTP_TOKENS)
        for times in arrivals.values():
            times.clear()
        running = asyncio.create_task(all_streams())
        await asyncio.wait_for(all_begun(), RECOVERY_S)
        if number == signal.SIGTERM:
            kill(targets, signal.SIGKILL)
        kill(serving, number)
        assert not running.done(), "too late to disturb anything"
        again, (over_http_again, connections) = await running
    assert [stream[:2] for stream in again] == [stream[:2] for stream in whole]
    assert max(epoch for *_, epoch in again) > 1, "no stream changed hands"
    assert over_http_again == over_http
    assert connections > 1
    await asyncio.to_thread(check_receipts, receipts, receipt_keys)
    await asyncio.to_thread(smoke.wait_until_idle)


def check_receipts(receipts: list[str], keys: Path) -> None:
    checker = ReceiptChecker("demo")
    assert len(receipts) == 4
    for text in receipts:
        signed = SignedReceipt.parse(text)
        signed.check(read_receipt_keys(keys))
        verdict = checker.verdict(signed.receipt)
        assert (verdict.result, verdict.reason, verdict.num_tokens) == ("valid", "", NUM_TOKENS)


def is_unmarked(process: psutil.Process) -> bool:
    """Whether this is a process of Ray's that runs and does not have the mark; one that ended has nothing."""
    with suppress(OSError, psutil.Error):
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return process.name().startswith("ray::") and MARK.encode() not in environment and runs(process)
    return False


def test_no_process_outlives_a_killed_launcher(smoke):
    """This is the last test that needs the cluster."""
    below = smoke.processes()
    assert len(below) > 6
    (redis,) = [process for process, command in smoke.commands() if "valkey-server" in command[0]]
    directory = Path(redis.cwd()).parent
    # The guardian knows Ray's processes by the mark, whatever they do to their titles.
    assert [process for process in below if is_unmarked(process)] == []
    smoke.launcher.send_signal(signal.SIGKILL)
    smoke.launcher.wait(STOP_TIMEOUT_S)
    assert wait_until_gone(below, STOP_TIMEOUT_S) == []
    assert eventually(lambda: not directory.exists(), STOP_TIMEOUT_S)
