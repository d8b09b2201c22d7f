"""Processes that generate without a cluster: `transformers` with its speculation, and gammaray's engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gammaray.bench.systems import Arrival
from gammaray.demo_pair import resolve_model

_START_TIMEOUT_S = 300.0
_GENERATE_TIMEOUT_S = 300.0
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
        target_s: Seconds that the target computed after the first of them; None if that is not reported.
        gaps: Of its tokens, if requested.
    """

    token_ids: tuple[int, ...]
    seconds: float
    arrivals: tuple[Arrival, ...]
    target_s: float | None = None
    gaps: Gaps | None = None


class Baselines:
    """A process that holds models; made by `running_baselines` and `running_engine`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._has_ended = False

    async def generate(
        self,
        system: str,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
        ignore_eos: bool = True,
        with_gaps: bool = False,
    ) -> Generated:
        """Return one completion. `transformers` completes one request at a time, the engine all in a batch.

        Args:
            system: Of transformers `generate`, `assisted-N` (N draft tokens per cycle) or `lookup-N` (prompt
                lookup); of the engine `engine` or `engine-lookup-N`.
            prompt: Text or token ids to continue.
            max_tokens: Upper bound of new tokens.
            temperature: 0 is greedy.
            seed: Seed of the sampling; only used above temperature 0.
            ignore_eos: Continue after end-of-sequence tokens.
            with_gaps: Return the gaps between logits, too. Only `transformers` does.

        Raises:
            RuntimeError: The process ended.
            TimeoutError: No answer within five minutes.
        """
        number = next(self._numbers)
        request = {
            "number": number,
            "system": system,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "with_gaps": with_gaps,
        }
        if self._has_ended:
            raise RuntimeError(_ENDED)
        answered = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            assert self._process.stdin is not None
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            await self._process.stdin.drain()
            answer = await asyncio.wait_for(answered, _GENERATE_TIMEOUT_S)
        finally:
            del self._waiting[number]
        arrivals = tuple((at, count) for at, count in answer["arrivals"])
        gaps = answer.get("gaps")
        return Generated(
            tuple(answer["token_ids"]),
            answer["seconds"],
            arrivals,
            answer.get("target_s"),
            gaps and Gaps(tuple(gaps["gaps"]), tuple(gaps["runners_up"]), gaps["noise"]),
        )

    async def wait_ready(self) -> None:
        """Wait for the process's first line, which says that the models are loaded.

        Raises:
            RuntimeError: The process ended.
            TimeoutError: It took longer than five minutes.
        """
        if await asyncio.wait_for(self._read(), _START_TIMEOUT_S) is None:
            raise RuntimeError(_ENDED)

    async def dispatch(self) -> None:
        """Pass answers on to the calls of `generate` that wait for them, until the process ends."""
        while (answer := await self._read()) is not None:
            answered = self._waiting.get(answer["number"])
            if answered is not None and not answered.done():
                answered.set_result(answer)
        self._has_ended = True
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(RuntimeError(_ENDED))

    async def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer


_ENDED = "the process that generates has ended; its error is printed above"


@asynccontextmanager
async def running_baselines(target: str, draft: str | None, threads: int = 1) -> AsyncIterator[Baselines]:
    """Start `transformers` with `threads` arithmetic threads; the process ends with the block.

    `target` and `draft` are directories or hub names, or "demo" for the demo pair. Without a draft there is
    no assisted generation.
    """
    models = (resolve_model(target, "target"), resolve_model(draft, "draft") if draft else "")
    async with _running("benchmarks.transformers_worker", models, threads) as baselines:
        yield baselines


@asynccontextmanager
async def running_engine(
    target: str, threads: int = 1, eos_token_ids: Collection[int] = ()
) -> AsyncIterator[Baselines]:
    """Start gammaray's engine alone; the process ends with the block.

    Args:
        target: Directory or hub name, or "demo".
        threads: Arithmetic threads.
        eos_token_ids: Tokens that end completions which do not ignore them.
    """
    given = (resolve_model(target, "target"), ",".join(map(str, eos_token_ids)))
    async with _running("benchmarks.engine_worker", given, threads) as baselines:
        yield baselines


@asynccontextmanager
async def running_vllm(target: str, threads: int = 1) -> AsyncIterator[Baselines]:
    """Start vLLM alone, which generates greedily; the process ends with the block.

    Args:
        target: Directory or hub name, or "demo".
        threads: Arithmetic threads.
    """
    given = (resolve_model(target, "target"), "")
    async with _running("benchmarks.vllm_worker", given, threads) as baselines:
        yield baselines


@asynccontextmanager
async def _running(module: str, arguments: Sequence[str], threads: int) -> AsyncIterator[Baselines]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments, str(threads)),
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
        await baselines.wait_ready()
        reader = asyncio.create_task(baselines.dispatch())
        try:
            yield baselines
        finally:
            reader.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
