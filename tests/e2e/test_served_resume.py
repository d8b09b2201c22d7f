"""Orchestrators that die during streams: clients get the same tokens over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from gammaray import AsyncClient, Client, GammarayError, NotFoundError, RetryPolicy, SessionState
from gammaray.types import FinishReason
from orchestrator.launcher.reaper import runs
from tests.support.cluster.cluster_helpers import Cluster, eventually, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(1200)]

NUM_TOKENS, NUM_HTTP_TOKENS = 250, 600
"""So many that a stream still runs when it is disturbed, however late that is on a busy machine."""

RECOVERY_S = 240.0
"""For a replica to be noticed as dead and replaced: its process alone takes ten seconds to start on a quiet
machine, and over a minute on a busy one."""

PATIENT = RetryPolicy(resume_s=RECOVERY_S)

PROMPTS = [
    "def read_lines(path):\n",
    "import os\n\nclass Stack:\n    def ",
    "for i in range(",
    "# naïve café: ",
]
STREAMS = [{"prompt": prompt, "temperature": t, "seed": 7} for prompt in PROMPTS for t in (0.0, 1.0)]
COMMON = {"max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def replicas() -> Iterator[Cluster]:
    with running_cluster("--orchestrators", "2") as cluster:
        yield cluster


def orchestrators(cluster: Cluster) -> list[psutil.Process]:
    """Wait until the cluster has recovered from the previous test, and return its two orchestrators.

    Call it before a stream begins: on a busy machine it may take longer than the stream.
    """
    found: set[int] = set()

    def have_both_settled() -> bool:
        nonlocal found
        views = []
        try:
            for _ in range(4):  # a new connection goes to the next one
                with Client(cluster.grpc) as client:
                    streamed = client.status(timeout_s=30)
                views.append({p.pid for p in streamed if p.role == "orchestrator" and p.healthy})
        except GammarayError:
            return False
        found = views[0]
        return len(found) == 2 and views.count(found) == len(views) and all(map(is_running, found))

    assert eventually(have_both_settled, RECOVERY_S), found
    return [psutil.Process(pid) for pid in found]


def is_running(pid: int) -> bool:
    try:
        return runs(psutil.Process(pid))
    except psutil.Error:
        return False


def kill(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was replaced in the meantime
            process.send_signal(number)


async def streamed(client: AsyncClient, fields, note) -> tuple[list[int], str]:
    tokens, text = [], []
    async for chunk in client.generate(**fields, **COMMON):
        assert chunk.offset == len(tokens)
        tokens += [token.token_id for token in chunk.tokens]
        text.append(chunk.text)
        note(chunk.session_id)
    return tokens, "".join(text)


async def all_streamed(client: AsyncClient, note) -> list[tuple[list[int], str]]:
    return list(await asyncio.gather(*(streamed(client, fields, note) for fields in STREAMS)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_sdk_streams_survive_the_loss_of_every_orchestrator(replicas, number):
    serving = await asyncio.to_thread(orchestrators, replicas)
    async with AsyncClient(replicas.grpc, retry=PATIENT) as client:
        undisturbed = await all_streamed(client, lambda name: None)
        pieces: set[str] = set()
        all_begun = asyncio.Event()

        def note(session_id: str) -> None:
            pieces.add(session_id)
            if len(pieces) == len(STREAMS):
                all_begun.set()

        running = asyncio.create_task(all_streamed(client, note))
        await asyncio.wait_for(all_begun.wait(), RECOVERY_S)
        kill(serving, number)
        assert not running.done(), "too late to disturb anything"
        assert await running == undisturbed
        epochs = [(await client.get_session(name, timeout_s=60))[0].epoch for name in pieces]
        assert len(epochs) == len(STREAMS)
        assert max(epochs) > 1, "no stream changed hands"
    await asyncio.to_thread(replicas.wait_until_idle)


def events_of(lines) -> Iterator[tuple[str, str]]:
    """Yield id and data of server-sent events."""
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, line[6:]


def stream_over_http(cluster: Cluster, path: str, body, after_event) -> tuple[str, list[int], int]:
    """Return text, token ids and the number of connections of a stream that is resumed until its end."""
    text, last_id, connections = "", None, 0
    token_ids: list[int] = []
    with httpx.Client(base_url=cluster.http, timeout=60) as client:
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            connections += 1
            headers = {} if last_id is None else {"Last-Event-ID": last_id}
            try:
                with client.stream("POST", path, json={"stream": True, **body}, headers=headers) as answer:
                    if answer.status_code != 200:
                        raise httpx.NetworkError(answer.read().decode())
                    for event_id, data in events_of(answer.iter_lines()):
                        if data == "[DONE]":
                            return text, token_ids, connections
                        event = json.loads(data)
                        if "error" in event:
                            raise httpx.NetworkError(data)
                        (choice,) = event["choices"]
                        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                        token_ids = event.get("gammaray", {}).get("token_ids", [])
                        last_id = event_id or last_id
                        after_event()
            except httpx.TransportError:
                time.sleep(0.5)
    raise AssertionError("it never ended")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_stream_resumes_after_the_last_event(replicas, path):
    serving = orchestrators(replicas)
    body = {"max_tokens": NUM_HTTP_TOKENS, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": "def hello"}]
    else:
        body["prompt"] = PROMPTS[0]
    # The proxy may still route to one that was killed before: what is compared is a stream of one piece.
    deadline = time.monotonic() + RECOVERY_S
    connections = 0
    while connections != 1:
        assert time.monotonic() < deadline, "no undisturbed stream"
        text, token_ids, connections = stream_over_http(replicas, path, body, lambda: None)
    assert len(token_ids) == NUM_HTTP_TOKENS
    num_events = 0

    def kill_after_some() -> None:
        nonlocal num_events
        num_events += 1
        if num_events == 4:
            kill(serving, signal.SIGKILL)

    again, ids_again, connections = stream_over_http(replicas, path, body, kill_after_some)
    assert connections > 1
    assert (again, ids_again) == (text, token_ids)


async def test_session_calls_reach_any_orchestrator(replicas):
    await asyncio.to_thread(orchestrators, replicas)
    async with AsyncClient(replicas.grpc, retry=PATIENT) as client:
        # Slowly, so that it still runs when it is asked for and cancelled.
        stream = client.generate("import ", max_tokens=1500, ignore_eos=True, session_id="called", gamma=0)
        first = await anext(stream)
        info, tokens = await client.get_session("called")
        assert info.state is SessionState.RUNNING
        assert [token.token_id for token in tokens][: len(first.tokens)] == [t.token_id for t in first.tokens]
        assert "called" in [info.session_id for info in await client.list_sessions()]
        cancelled = await client.cancel("called")
        assert cancelled.finish_reason is FinishReason.CANCELLED
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason is FinishReason.CANCELLED
        again = await client.complete("more", session_id="called", turn=1, max_tokens=5, ignore_eos=True)
        assert len(again.tokens) == 5
        assert [chunk.turn async for chunk in client.resume("called", turn=1)] == [1]
        assert await client.delete_session("called")
        assert not await client.delete_session("called")
        with pytest.raises(NotFoundError):
            await client.get_session("called")
