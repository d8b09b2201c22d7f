"""A real llama.cpp server drafts, with the demo pair's draft model; `LLAMA_SERVER` names its binary."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import urllib.request
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from gammaray.demo_pair import resolve_model
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from tests.support.gguf_helpers import write_gguf
from tests.support.workers.scripted_workers import until, until_so
from tests.support.workers.service_helpers import PROMPTS, complete, running, tokens_of, worker_process

BINARY = os.environ.get("LLAMA_SERVER", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.skipif(
        not BINARY, reason="LLAMA_SERVER names no llama-server; to enable: LLAMA_SERVER=path of one"
    ),
]

NUM_TOKENS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The demo pair's draft model as a GGUF file."""
    folder, path = Path(resolve_model("demo", "draft")), tmp_path_factory.mktemp("gguf") / "draft.gguf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    write_gguf(model, path, tokenizer=folder / "tokenizer.json")
    return path


@pytest.fixture(scope="module")
def target():
    with worker_process("target") as (_, address):
        yield address


class Llama:
    """A llama.cpp server, which can be killed and started again on the same port."""

    def __init__(self, model, log):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.url = f"openai:http://127.0.0.1:{self.port}/v1"
        self._command = [BINARY, "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        self._command += ["-t", "1", "-np", "2", "-c", "4096"]
        self._log, self._process = log, None

    def _spawn(self):
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    async def start(self):
        self._spawn()
        assert await until_so(lambda: asyncio.to_thread(self._answers), 120.0), self._log.read_text()[-2000:]
        assert self._process.poll() is None, self._log.read_text()[-2000:]

    def _answers(self):
        if self._process.poll() is not None:
            return True  # nothing will answer
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def kill(self):
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@asynccontextmanager
async def drafted(redis_server, target, model, tmp_path, **settings):
    llama = Llama(model, tmp_path / "llama.log")
    await llama.start()
    try:
        settings = {"draft_server": llama.url, "propose_timeout_s": 30.0, **settings}
        async with running(redis_server, target, "", **settings) as orchestrator:
            yield orchestrator, llama
    finally:
        llama.kill()


def request_of(gamma, temperature, prompt=PROMPTS[0]):
    return GenerationRequest(
        prompt,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        sampling=SamplingParams(temperature=temperature, seed=1234),
        gamma=GammaPolicy(gamma),
        drafter=DrafterKind.SERVER,
    )


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.5), (1.0, 0.2)])
async def test_llama_server_drafts_and_changes_no_token(
    redis_server, target, model, tmp_path, temperature, least
):
    async with drafted(redis_server, target, model, tmp_path) as (orchestrator, _):
        for prompt in PROMPTS:
            plain = await complete(orchestrator, request_of(0, temperature, prompt))
            chunks = await complete(orchestrator, request_of(4, temperature, prompt))
            assert tokens_of(chunks) == tokens_of(plain)
            assert chunks[-1].summary.server_cycles > 0
            assert chunks[-1].summary.fallback_cycles == 0
        totals = orchestrator.meter.totals
        assert totals.accepted_tokens / totals.draft_tokens > least
        (process,) = (process for process in await orchestrator.status() if process.role == "draft")
        assert (process.model.partition(":")[0], process.kernel) == ("llama.cpp", "token ids")


async def test_sessions_at_once_have_slots_of_their_own(redis_server, target, model, tmp_path):
    async with drafted(redis_server, target, model, tmp_path) as (orchestrator, _):
        assert orchestrator.draft_server.identity.num_slots == 2
        plain = [tokens_of(await complete(orchestrator, request_of(0, 1.0, prompt))) for prompt in PROMPTS]
        work = (complete(orchestrator, request_of(4, 1.0, prompt)) for prompt in PROMPTS)
        assert [tokens_of(chunks) for chunks in await asyncio.gather(*work)] == plain


async def test_kill_of_the_llama_server_costs_only_speed(redis_server, target, model, tmp_path):
    async with drafted(redis_server, target, model, tmp_path) as (orchestrator, llama):
        plain = tokens_of(await complete(orchestrator, request_of(0, 1.0)))
        chunks = []
        async for chunk in orchestrator.generate(request_of(4, 1.0)):
            chunks.append(chunk)
            if len(chunks) == 3:
                llama.kill()
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.server_cycles > 0
        assert chunks[-1].summary.fallback_cycles > 0
        await llama.start()
        await until(lambda: orchestrator.draft_server.is_usable)
        chunks = await complete(orchestrator, request_of(4, 1.0))
        assert tokens_of(chunks) == plain
        assert chunks[-1].summary.fallback_cycles == 0
