"""Emulated nodes of small and large GPUs: placement, drafters that follow the load, nodes that die."""

import asyncio
import json
import time

import pytest

from gammaray import AsyncClient
from tests.chaos.chaos_drafters import Way
from tests.chaos.clients import Clients
from tests.chaos.load import Ask, Stream, reference
from tests.support.cluster.cluster_helpers import program

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(1500), pytest.mark.nightly]

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 720.0, 60.0
READY_TIMEOUT_S = 400.0
PATIENCE_S = 300.0
"""For the next step of scaling, or some streams: on a busy machine replicas take minutes to start."""

NUM_STREAMS = 12


class Nodes:
    """The emulated nodes: answer commands with the placement, one at a time."""

    def __init__(self, program):
        self._program = program
        word, self.grpc = program.answer(START_TIMEOUT_S).split()
        assert word == "ready"

    async def ask(self, command=""):
        return json.loads(await asyncio.to_thread(self._program.ask, command, ANSWER_TIMEOUT_S))

    async def until(self, condition):
        deadline = time.monotonic() + PATIENCE_S
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
    with (
        open(tmp_path_factory.mktemp("nodes") / "log", "wb") as log,
        program("several_nodes", stderr=log) as running,
    ):
        yield Nodes(running)


ASKS = [Ask("def read_lines(path):\n", 1.0, seed, max_tokens=80) for seed in range(4)]


def traffic(nodes, expected, count, gamma):
    """Return clients that keep so many streams going; each must give the tokens of plain decoding."""
    way = Way(f"gamma {gamma}", (), {"gamma": gamma}, keeps_outputs=True)
    asked = [Stream(ASKS[number % len(ASKS)], way) for number in range(count)]
    return Clients(nodes.grpc, "", asked, expected, PATIENCE_S, num_http=0, may_fail=False)


async def test_drafters_follow_the_load_and_streams_survive_drains_and_lost_nodes(nodes):
    """This is the last test that needs the nodes."""
    async with AsyncClient(nodes.grpc) as client:
        await client.wait_ready(READY_TIMEOUT_S, roles=("target", "draft"))
    placement = await nodes.ask()
    assert placement["TargetWorker"] == ["large-a", "large-b"]
    assert placement["DraftWorker"][0].startswith("small-")
    assert placement["Orchestrator"] == ["head"]
    expected = await reference(nodes.grpc, ASKS)
    clients = traffic(nodes, expected, NUM_STREAMS, gamma=8)
    async with clients.streaming():
        placement = await nodes.until_drafters(3)
        assert placement["DraftWorker"] == ["small-a", "small-a", "small-b"]
        await clients.have_ended(4)
    clients = traffic(nodes, expected, 3, gamma=1)
    async with clients.streaming():
        # One stream per drafter: two of them must move when their drafters go.
        (left,) = (await nodes.until_drafters(1))["DraftWorker"]
        await clients.have_ended(3)
    clients = traffic(nodes, expected, 4, gamma=4)
    async with clients.streaming():
        for name in (left, "large-b"):
            await nodes.ask(f"kill {name}")
            await clients.have_ended(4)
    await nodes.until(lambda placement: placement["TargetWorker"] == ["large-a"])
