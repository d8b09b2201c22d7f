"""Emulated nodes of small and large GPUs: placement, drafters that follow the load, nodes that die."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gammaray import AsyncClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("several_nodes.py")
START_TIMEOUT_S, ANSWER_TIMEOUT_S, STOP_TIMEOUT_S = 330.0, 60.0, 120.0
PATIENCE_S = 300.0
"""For the next step of scaling, or some streams: on a busy machine replicas take minutes to start."""

PROMPT, SEEDS = "def read_lines(path):\n", range(4)


class Nodes:
    """The emulated cluster: takes commands, one at a time."""

    def __init__(self, process, grpc):
        self.process, self.grpc = process, grpc

    async def ask(self, command):
        self.process.stdin.write(f"{command}\n".encode())
        line = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_TIMEOUT_S)
        return json.loads(line)

    async def until(self, condition, timeout_s=PATIENCE_S):
        """Wait until the placement meets a condition, and return it."""
        deadline = time.monotonic() + timeout_s
        while not condition(placement := await self.ask("placement")):
            assert time.monotonic() < deadline, placement
            await asyncio.sleep(0.3)
        return placement

    async def until_drafters(self, count):
        """Wait until so many drafters run; return the placement. Targets must stay where they are."""

        def condition(placement):
            assert placement["TargetWorker"] == ["large-a", "large-b"]
            return len(placement["DraftWorker"]) == count

        return await self.until(condition)


@pytest.fixture
def log(tmp_path):
    with open(tmp_path / "log", "wb") as file:
        yield file


@asynccontextmanager
async def emulated_nodes(log):
    root = str(SCRIPT.parents[2])
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env={**os.environ, "PYTHONPATH": root},
    )
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        word, grpc = line.decode().split()
        assert word == "ready"
        yield Nodes(process, grpc)
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def token_ids(client, seed, gamma):
    options = {"seed": seed, "gamma": gamma, "max_tokens": 80, "ignore_eos": True, "timeout_s": PATIENCE_S}
    return [token.token_id for token in (await client.complete(PROMPT, **options)).tokens]


@asynccontextmanager
async def traffic(client, expected, count, gamma):
    """Keep `count` streams going; each must give the tokens of plain decoding. Yields how many have."""
    finished = []

    async def stream(number):
        while True:
            seed = SEEDS[number % len(SEEDS)]
            assert await token_ids(client, seed, gamma) == expected[seed]
            finished.append(seed)

    tasks = [asyncio.create_task(stream(number)) for number in range(count)]
    try:
        yield finished
        assert [task.exception() for task in tasks if task.done()] == []
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def more(finished, count, timeout_s=PATIENCE_S):
    """Wait until `count` more streams finished."""
    wanted, deadline = len(finished) + count, time.monotonic() + timeout_s
    while len(finished) < wanted:
        assert time.monotonic() < deadline, f"{len(finished)} of {wanted} streams"
        await asyncio.sleep(0.05)


async def test_drafters_follow_the_load_and_streams_survive_drains_and_lost_nodes(log):
    async with emulated_nodes(log) as nodes, AsyncClient(nodes.grpc) as client:
        await client.wait_ready(PATIENCE_S, roles=("target", "draft"))
        placement = await nodes.ask("placement")
        assert placement["TargetWorker"] == ["large-a", "large-b"]
        assert placement["DraftWorker"][0].startswith("small-")
        assert placement["Orchestrator"] == ["head"]
        plain = await asyncio.gather(*(token_ids(client, seed, 0) for seed in SEEDS))
        expected = dict(zip(SEEDS, plain, strict=True))

        async with traffic(client, expected, 12, gamma=8) as finished:
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
