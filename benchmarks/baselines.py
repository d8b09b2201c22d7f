"""A process that generates without a cluster: `transformers` with its speculation."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gammaray.bench.systems import Arrival, Ask, Sample
from gammaray.demo_pair import resolve_model

REFERENCE = "generate"
"""transformers' plain decoding."""

_TIMEOUT_S = 300.0
_LINE_LIMIT = 2**24


@dataclass(frozen=True)
class Gaps:
    """How clearly each token of a greedy completion was chosen.

    Attributes:
        gaps: By token, the largest logit minus the second largest one.
        runners_up: By token, the token with the second largest logit.
        noise: Largest difference to the same gaps if one forward computes them instead of one per token.
    """

    gaps: tuple[float, ...]
    runners_up: tuple[int, ...]
    noise: float


@dataclass(frozen=True)
class Generated:
    """One completion.

    Attributes:
        token_ids: The tokens.
        seconds: Time of the completion in the process that made it, without the pipe.
        arrivals: When tokens were known, by the same clock.
        gaps: Of its tokens, if requested.
    """

    token_ids: tuple[int, ...]
    seconds: float
    arrivals: tuple[Arrival, ...]
    gaps: Gaps | None = None


class Baselines:
    """A process that holds models and completes one request at a time; made by `running_baselines`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()

    async def generate(self, system: str, ask: Ask, *, with_gaps: bool = False) -> Generated:
        """Return one completion.

        Args:
            system: `generate`, `assisted-N` (N draft tokens per cycle) or `lookup-N` (prompt lookup).
            ask: What to complete; its prediction is ignored.
            with_gaps: Return the gaps between logits, too.

        Raises:
            RuntimeError: The process ended.
            TimeoutError: No answer within five minutes.
        """
        request = {"system": system, **asdict(ask), "with_gaps": with_gaps}
        assert self._process.stdin is not None
        async with self._turn:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            await self._process.stdin.drain()
            answer = await self.read()
        gaps = answer["gaps"]
        return Generated(
            tuple(answer["token_ids"]),
            answer["seconds"],
            tuple((at, count) for at, count in answer["arrivals"]),
            gaps and Gaps(tuple(gaps["gaps"]), tuple(gaps["runners_up"]), gaps["noise"]),
        )

    async def read(self) -> dict[str, Any]:
        """Return the process's next line; the first one says that the models are loaded.

        Raises:
            RuntimeError: The process ended.
            TimeoutError: It took longer than five minutes.
        """
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), _TIMEOUT_S)
        if not line:
            raise RuntimeError("the process that generates has ended; its error is printed above")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Peer:
    """A system of `Baselines`, by the name it has there; implements `System`."""

    def __init__(self, name: str, baselines: Baselines) -> None:
        self.name = name
        self._baselines = baselines

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion; its times are taken in the process that generates."""
        made = await self._baselines.generate(self.name, ask)
        return Sample(made.token_ids, made.seconds, made.arrivals)


@asynccontextmanager
async def running_baselines(
    target: str, draft: str | None = None, threads: int = 1
) -> AsyncIterator[Baselines]:
    """Start `transformers` with `threads` arithmetic threads; the process ends with the block.

    Args:
        target: Directory or hub name, or "demo".
        draft: Likewise; without one there is no assisted generation.
        threads: Arithmetic threads.
    """
    models = (resolve_model(target, "target"), resolve_model(draft, "draft") if draft else "")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.transformers_worker", *models, str(threads)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE_LIMIT,
        cwd=Path(__file__).parent.parent,
        env=environment,
        # As the cluster: Linux divides the cores between sessions first (`sched_autogroup`).
        start_new_session=True,
    )
    try:
        baselines = Baselines(process)
        await baselines.read()
        yield baselines
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
