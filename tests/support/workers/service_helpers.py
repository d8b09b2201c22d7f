"""An orchestrator in this process, and what to do with its chunks."""

from __future__ import annotations

import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

from gammaray.config import OrchestratorSettings
from gammaray.types import GenerationRequest, SamplingParams
from orchestrator.service import Orchestrator

PROMPTS = ["def read_lines(path):\n", "import os\n\nclass Stack:\n    def ", "for i in range(", "# A short"]
SEEDED = SamplingParams(temperature=1.0, seed=1234)


@asynccontextmanager
async def running(server, target: str, draft: str, **settings):
    orchestrator = await Orchestrator.start(
        OrchestratorSettings(redis_url=server.url, target_addresses=target, draft_addresses=draft, **settings)
    )
    try:
        yield orchestrator
    finally:
        await orchestrator.close()


async def complete(orchestrator, request: GenerationRequest, after_chunk=lambda count: None):
    """Return all chunks of a completion; `after_chunk` is called with the number of chunks so far."""
    chunks = []
    async for chunk in orchestrator.generate(request):
        chunks.append(chunk)
        after_chunk(len(chunks))
    return chunks


def tokens_of(chunks) -> list[int]:
    return [token.token_id for chunk in chunks for token in chunk.tokens]


def text_of(chunks) -> str:
    return "".join(chunk.text for chunk in chunks)


@contextmanager
def worker_process(role: str, model: str = "demo", *options: str):
    """Run a worker, by default with the demo pair; yields its process and address."""
    command = [
        sys.executable,
        "-m",
        f"services.{role}",
        "--model",
        model,
        "--listen",
        "127.0.0.1:0",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.kill()
        process.communicate()
