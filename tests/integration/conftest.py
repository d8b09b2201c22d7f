"""What all integration tests share."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from orchestrator.storage.client import connect
from orchestrator.workers.backoff import AdaptiveTimeout
from tests.support.workers.redis_helpers import EACH_SERVER, running_redis
from tests.support.workers.scripted_workers import scripted
from tests.support.workers.service_helpers import running, worker_process


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch):
    """A drafter is late only at a test's deadline, not if this machine stalls for half a second."""
    monkeypatch.setattr(AdaptiveTimeout, "NUM_SAMPLES", 1_000_000)


def pytest_generate_tests(metafunc):
    if "redis_server" in metafunc.fixturenames and metafunc.definition.get_closest_marker("each_redis"):
        metafunc.parametrize("redis_server", EACH_SERVER, indirect=True, scope="module")


@pytest.fixture(scope="module")
def redis_server(request):
    with running_redis(getattr(request, "param", "embedded")) as server:
        yield server


@pytest.fixture
async def redis(redis_server):
    client = connect(redis_server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def empty(redis):
    """Nothing of earlier tests is in the server."""
    await redis.flushall()


@pytest.fixture
async def target():
    """A scripted target worker with the demo pair's vocabulary."""
    async with scripted("target", vocab_size=2048, max_context=2048) as target:
        yield target


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small random Llama model; no test changes it."""
    from tests.support.engine_helpers import tiny_model  # only these tests need torch

    return tiny_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="session")
def workers():
    """Addresses of a target and a draft worker with the demo pair, which no test ends."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        both = threads.map(stack.enter_context, (worker_process("target"), worker_process("draft")))
        yield tuple(address for _, address in both)


@pytest.fixture
async def orchestrator(redis_server, workers):
    async with running(redis_server, *workers) as orchestrator:
        yield orchestrator
