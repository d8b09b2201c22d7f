"""Metrics of standalone workers."""

import asyncio
import urllib.request

import pytest

from orchestrator.launcher.preflight import free_ports
from services.engine.native.library import load_kernel
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.workers.process_helpers import spawned
from tests.support.workers.workers_helpers import Link, propose_block

pytestmark = pytest.mark.integration

PROMPT = random_tokens(12, seed=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("metrics"), max_position_embeddings=1024)


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return answer.read().decode()


@pytest.mark.slow
async def test_standalone_worker_serves_its_metrics(model):
    (port,) = free_ports("127.0.0.1", 1)
    async with spawned("draft", "--model", model, "--metrics-listen", f"127.0.0.1:{port}") as (_, address):
        link = Link(address, "draft")
        for block in range(3):
            await link.ask(propose_block(PROMPT, 2, session_id=f"s{block}"))
        info = await link.info()
        assert info.metrics_address == f"127.0.0.1:{port}"
        assert info.totals.steps >= 3
        assert info.kernel == load_kernel().variant
        text = await asyncio.to_thread(scrape, info.metrics_address)
        assert f'gammaray_worker_step_blocks_count{{role="draft"}} {info.totals.steps}.0' in text
        await link.close()
