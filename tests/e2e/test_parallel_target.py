"""A target spread over two ranks, through the whole stack."""

import asyncio
import os
import signal

import pytest

from gammaray import AsyncClient
from tests.support.cluster.cluster_helpers import running_cluster, wait_until_gone

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"
WAYS = [
    {"temperature": 0, "gamma": 4},
    {"temperature": 1.0, "seed": 5, "gamma": 0},
    {"temperature": 1.0, "seed": 5, "gamma": 4},
    {"temperature": 0.8, "top_p": 0.9, "seed": 6, "gamma": 8},
]
PLAIN, DRAFTED = 1, 2


async def tokens(grpc):
    """Return the tokens that each way of asking gives."""
    async with AsyncClient(grpc) as client:

        async def run(options):
            completion = await client.complete(PROMPT, max_tokens=40, ignore_eos=True, **options)
            return [token.token_id for token in completion.tokens]

        return await asyncio.gather(*map(run, WAYS))


def ranks(cluster):
    return [
        process
        for process, command in cluster.commands()
        if "services.engine.tensor_parallel.rank_main" in command
    ]


def test_two_ranks_give_the_same_tokens_however_they_are_drafted_and_survive_the_loss_of_one(monkeypatch):
    """Those of one rank, as `tests/integration/test_parallel.py` shows."""
    monkeypatch.setenv("GAMMARAY_WORKER_WAIT_S", "240")
    with running_cluster("--tensor-parallel", "2", "--device", "cpu") as cluster:
        expected = asyncio.run(tokens(cluster.grpc))
        assert expected[PLAIN] == expected[DRAFTED]
        (rank,) = ranks(cluster)
        os.kill(rank.pid, signal.SIGKILL)
        # The worker ends with it and Serve starts another one, for which requests wait.
        assert asyncio.run(tokens(cluster.grpc)) == expected
        (successor,) = ranks(cluster)
        assert successor.pid != rank.pid
    assert wait_until_gone([successor], 1) == []
