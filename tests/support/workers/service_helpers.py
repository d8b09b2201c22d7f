"""An orchestrator in this process, and what to do with its chunks."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from unittest.mock import patch

from gammaray.config import REDIS_PREFIX, OrchestratorSettings
from gammaray.types import GenerationRequest, SamplingParams
from orchestrator.access.caller import ANONYMOUS, Caller
from orchestrator.service import Orchestrator
from services.process.registry import Announcer

PROMPTS = ["def read_lines(path):\n", "import os\n\nclass Stack:\n    def ", "for i in range(", "# A short"]
SEEDED = SamplingParams(temperature=1.0, seed=1234)


_DEADLINES = {
    "propose_timeout_s": "orchestrator.drafting.factory.PROPOSE_TIMEOUT_S",
    "redis_wait_s": "orchestrator.service.REDIS_WAIT_S",
    "verify_timeout_s": "orchestrator.service.VERIFY_TIMEOUT_S",
    "worker_wait_s": "orchestrator.service.WORKER_WAIT_S",
}


@asynccontextmanager
async def announced(url: str, target: str, draft: str, prefix: str = REDIS_PREFIX):
    """Announce workers in a Redis, as their own processes would; addresses are separated by commas."""
    async with AsyncExitStack() as entries:
        for role, addresses in (("target", target), ("draft", draft)):
            for address in filter(None, addresses.split(",")):
                announcer = Announcer(url, role, address, prefix)
                await announcer.start()
                entries.push_async_callback(announcer.withdraw)
        yield


@asynccontextmanager
async def running(server, target: str, draft: str, **settings):
    """Run an orchestrator with these workers and settings, or other values of `_DEADLINES`."""
    given = {name: settings.pop(name) for name in _DEADLINES if name in settings}
    own = OrchestratorSettings(redis_url=server.url, **settings)
    with ExitStack() as patched:
        for name, value in given.items():
            patched.enter_context(patch(_DEADLINES[name], value))
        async with announced(server.url, target, draft, own.redis_prefix):
            orchestrator = await Orchestrator.start(own)
            try:
                yield orchestrator
            finally:
                await orchestrator.close()


async def complete(orchestrator, request: GenerationRequest, caller: Caller = ANONYMOUS):
    return [chunk async for chunk in orchestrator.generate(request, caller) if not chunk.is_opening]


async def first_tokens(stream):
    """Return the first chunk of a stream that has tokens: workers know the session then."""
    async for chunk in stream:
        if not chunk.is_opening:
            return chunk
    raise AssertionError("the stream has no tokens")


async def rest_of(stream) -> list:
    return [chunk async for chunk in stream]


def tokens_of(chunks) -> list[int]:
    return [token.token_id for chunk in chunks for token in chunk.tokens]


def text_of(chunks) -> str:
    return "".join(chunk.text for chunk in chunks)


@contextmanager
def worker_process(
    role: str, model: str = "demo", *options: str, environment: Mapping[str, str] = os.environ
):
    """Run a worker, by default with the demo pair; yields its process and address."""
    command = [sys.executable, "-m", f"services.{role}_worker", "--model", model]
    command += ["--listen", "127.0.0.1:0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()
