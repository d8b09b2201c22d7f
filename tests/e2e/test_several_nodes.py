"""Emulated nodes of small and large GPUs: placement, drafters that follow the load, nodes that die."""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gammaray import AsyncClient
from gammaray.aio import end_tasks

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(1500), pytest.mark.nightly]

SCRIPT = Path(__file__).parents[1] / "support" / "cluster" / "several_nodes.py"
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 720.0, 60.0, 120.0
READY_TIMEOUT_S = 400.0
PATIENCE_S = 300.0
"""For the next step of scaling, or some streams: on a busy machine replicas take minutes to start."""

PROMPT, SEEDS, NUM_STREAMS = "def read_lines(path):\n", range(4), 12


class Nodes:
    """The emulated nodes: answer commands with the placement, one at a time.

    Args:
        process: `several_nodes.py`, with pipes that are not buffered.
    """

    def __init__(self, process):
        self.process = process
        word, self.grpc = self._line(START_TIMEOUT_S).decode().split()
        assert word == "ready"

    async def ask(self, command=""):
        self.process.stdin.write(f"{command}\n".encode())
        return json.loads(await asyncio.to_thread(self._line, ANSWER_TIMEOUT_S))

    def _line(self, timeout_s):
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        assert readable, f"no answer within {timeout_s:g} s"
        return self.process.stdout.readline()

    async def until(self, condition, timeout_s=PATIENCE_S):
        deadline = time.monotonic() + timeout_s
        while not condition(placement := await self.ask()):
            assert time.monotonic() < deadline, placement
            await asyncio.sleep(0.3)
        return placement

    async def until_drafters(self, count):
        """Wait until so many drafters run; return the placement. Targets must stay where they are."""

        def condition(placement):
            assert placement["TargetWorker"] == ["large-a", "large-b"]
            return len(placement["DraftWorker"]) == count

        return await self.until(condition)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with open(tmp_path_factory.mktemp("nodes") / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[3])},
        )
    try:
        yield Nodes(process)
        process.stdin.close()
        assert process.wait(STOP_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait()


async def complete(client, seed, gamma):
    options = {"seed": seed, "gamma": gamma, "max_tokens": 80, "ignore_eos": True, "timeout_s": PATIENCE_S}
    return await client.complete(PROMPT, **options)


def tokens_of(completion):
    return [token.token_id for token in completion.tokens]


async def plain_tokens(client):
    completions = await asyncio.gather(*(complete(client, seed, 0) for seed in SEEDS))
    return {seed: tokens_of(completion) for seed, completion in zip(SEEDS, completions, strict=True)}


@asynccontextmanager
async def traffic(client, expected, count, gamma):
    """Keep `count` streams going; each must give the tokens of plain decoding.

    Yields the summaries of those that ended.
    """
    finished = []

    async def stream(number):
        while True:
            seed = SEEDS[number % len(SEEDS)]
            completion = await complete(client, seed, gamma)
            assert tokens_of(completion) == expected[seed]
            finished.append(completion.summary)

    tasks = [asyncio.create_task(stream(number)) for number in range(count)]
    try:
        yield finished
        assert [task.exception() for task in tasks if task.done()] == []
    finally:
        await end_tasks(*tasks)


async def more(finished, count, timeout_s=PATIENCE_S):
    wanted, deadline = len(finished) + count, time.monotonic() + timeout_s
    while len(finished) < wanted:
        assert time.monotonic() < deadline, f"{len(finished)} of {wanted} streams"
        await asyncio.sleep(0.05)


async def test_drafters_follow_the_load_and_streams_survive_drains_and_lost_nodes(nodes):
    """This is the last test that needs the nodes."""
    async with AsyncClient(nodes.grpc) as client:
        await client.wait_ready(READY_TIMEOUT_S, roles=("target", "draft"))
        placement = await nodes.ask()
        assert placement["TargetWorker"] == ["large-a", "large-b"]
        assert placement["DraftWorker"][0].startswith("small-")
        assert placement["Orchestrator"] == ["head"]
        expected = await plain_tokens(client)

        async with traffic(client, expected, NUM_STREAMS, gamma=8) as finished:
            placement = await nodes.until_drafters(3)
            assert placement["DraftWorker"] == ["small-a", "small-a", "small-b"]
            await more(finished, 4)
        async with traffic(client, expected, 3, gamma=1) as finished:
            # One stream per drafter: two of them must move when their drafters go.
            (left,) = (await nodes.until_drafters(1))["DraftWorker"]
            await more(finished, 3)

        async with traffic(client, expected, 4, gamma=4) as finished:
            await nodes.ask(f"kill {left}")
            await more(finished, 4)
            await nodes.ask("kill large-b")
            await more(finished, 4)
        await nodes.until(lambda placement: placement["TargetWorker"] == ["large-a"])
