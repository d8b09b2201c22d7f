"""Orchestrators that end during streams: clients get the same tokens over gRPC and HTTP.

`tests/e2e/test_smoke.py` kills them with SIGKILL.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator

import pytest

from gammaray import AsyncClient, NotFoundError, SessionState
from gammaray.types import FinishReason
from tests.support.cluster.cluster_helpers import Cluster, running_cluster
from tests.support.cluster.takeover_helpers import (
    PATIENT,
    RECOVERY_S,
    kill,
    stream_over_http,
    two_orchestrators,
)

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(1200)]

NUM_TOKENS, NUM_HTTP_TOKENS = 250, 600
"""So many that a stream still runs when it is disturbed, however late that is on a busy machine."""

PATH = "/v1/chat/completions"
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


async def test_sdk_streams_survive_the_end_of_every_orchestrator(replicas):
    serving = await asyncio.to_thread(two_orchestrators, replicas)
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
        kill(serving, signal.SIGTERM)
        assert not running.done(), "too late to disturb anything"
        assert await running == undisturbed
        epochs = [(await client.get_session(name, timeout_s=60))[0].epoch for name in pieces]
        assert len(epochs) == len(STREAMS)
        assert max(epochs) > 1, "no stream changed hands"
    await asyncio.to_thread(replicas.wait_until_idle)


def test_chat_stream_resumes_after_the_last_event(replicas):
    serving = two_orchestrators(replicas)
    options = {"max_tokens": NUM_HTTP_TOKENS, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    body = {**options, "messages": [{"role": "user", "content": "def hello"}]}
    # The proxy may still route to one that was killed before: what is compared is a stream of one piece.
    deadline = time.monotonic() + RECOVERY_S
    connections = 0
    while connections != 1:
        assert time.monotonic() < deadline, "no undisturbed stream"
        text, token_ids, connections = stream_over_http(replicas, PATH, body, lambda: None)
    assert len(token_ids) == NUM_HTTP_TOKENS
    num_events = 0

    def kill_after_some() -> None:
        nonlocal num_events
        num_events += 1
        if num_events == 4:
            kill(serving, signal.SIGKILL)

    again, ids_again, connections = stream_over_http(replicas, PATH, body, kill_after_some)
    assert connections > 1
    assert (again, ids_again) == (text, token_ids)


async def test_session_calls_reach_any_orchestrator(replicas):
    await asyncio.to_thread(two_orchestrators, replicas)
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
