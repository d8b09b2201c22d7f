"""What gammaray is measured against: `transformers` generate, assisted generation and prompt lookup."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.core.model import resolve_model

__all__ = ["Baselines", "Generated", "running_baselines"]

_START_TIMEOUT_S = 120.0
_GENERATE_TIMEOUT_S = 300.0
_LINE_LIMIT = 2**24


@dataclass(frozen=True)
class Generated:
    """One completion by `transformers`; `seconds` is the time of the `generate` call alone."""

    token_ids: tuple[int, ...]
    seconds: float


class Baselines:
    """A process that holds the pair in `transformers`; make one with `running_baselines`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def generate(
        self,
        system: str,
        prompt: str,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = True,
    ) -> Generated:
        """Return one completion.

        Args:
            system: `generate`, `assisted-N` (N draft tokens per cycle) or `lookup-N` (prompt lookup).
            prompt: Text to continue.
            max_tokens: Upper bound of new tokens.
            temperature: 0 is greedy.
            seed: Of torch's generator; only used above temperature 0.
            ignore_eos: Go on past end-of-sequence tokens.

        Raises:
            RuntimeError: The process ended.
            TimeoutError: No answer within five minutes.
        """
        request = {
            "system": system,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": ignore_eos,
        }
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        await self._process.stdin.drain()
        answer = await self.read(_GENERATE_TIMEOUT_S)
        return Generated(tuple(answer["token_ids"]), answer["seconds"])

    async def read(self, timeout_s: float) -> dict[str, Any]:
        """Return the next line of the process."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError("the transformers process ended; its error stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@asynccontextmanager
async def running_baselines(target: str, draft: str, threads: int = 1) -> AsyncIterator[Baselines]:
    """Start the process with `threads` arithmetic threads; it ends with the block.

    `target` and `draft` are directories or hub names, or "demo" for the demo pair.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.transformers_worker"),
        *(resolve_model(target, "target"), resolve_model(draft, "draft"), str(threads)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT,
        cwd=Path(__file__).parent.parent,
        env=environment,
    )
    try:
        baselines = Baselines(process)
        await baselines.read(_START_TIMEOUT_S)
        yield baselines
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
