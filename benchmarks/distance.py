"""Speed over plain decoding with the draft worker 0 to 30 ms away, one way.

    python -m benchmarks.distance              # a quarter of an hour
    python -m benchmarks.distance --target-ms 25 --draft-ms 4 --delays 0 10

Forwards are simulated: the demo pair computes, and each worker sleeps until its forward has taken as long as
is asked for. The workers are processes, the orchestrator is in this one, and a relay delays what it and the
draft worker say to each other. All tokens are compared with those of plain decoding; exits with 1 if one
differs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cluster import run_or_exit
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.relay import relay
from benchmarks.simulated import simulated_worker
from benchmarks.workloads import prompts
from gammaray.config import OrchestratorSettings
from gammaray.types import DrafterKind, GammaPolicy, GenerationRequest, SamplingParams
from orchestrator.launcher.redis_server import RedisServer
from orchestrator.service import Orchestrator
from services.process.registry import Announcer

WARM_UP = 2
"""Rounds over the prompts that are not measured: adaptive gamma learns what cycles cost."""

PLAIN = GammaPolicy(0)
POLICIES = {"4": GammaPolicy(4), "8": GammaPolicy(8), "adaptive": GammaPolicy()}


class Run(NamedTuple):
    """A completion: its tokens, their speed after the first chunk, and how its cycles were drafted."""

    token_ids: list[int]
    tokens_per_s: float
    cycles: int
    model_cycles: int


async def complete(orchestrator: Orchestrator, request: GenerationRequest) -> Run:
    """Return a completion."""
    token_ids: list[int] = []
    first_s, num_first, summary = 0.0, 0, None
    async for chunk in orchestrator.generate(request):
        if chunk.tokens:
            token_ids += [token.token_id for token in chunk.tokens]
            if not first_s:
                first_s, num_first = time.perf_counter(), len(token_ids)
        summary = chunk.summary or summary
    assert summary is not None
    seconds = time.perf_counter() - first_s
    speed = (len(token_ids) - num_first) / seconds
    return Run(token_ids, speed, summary.cycles, summary.model_cycles)


async def measure(
    orchestrator: Orchestrator, texts: Sequence[str], temperature: float, tokens: int
) -> dict[str, Any]:
    """Return each policy's speed over plain decoding, as a geometric mean over the prompts, and counts."""
    ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
    cycles, by_model = Counter[str](), Counter[str]()
    plain_runs: dict[int, Run] = {}
    compared = equal = 0
    for turn in range(WARM_UP + 1):
        for number, text in enumerate(texts):
            sampling = SamplingParams(temperature=temperature, seed=number + 1)
            ask = GenerationRequest(text, sampling=sampling, max_tokens=tokens, ignore_eos=True, store=False)
            if number not in plain_runs:
                alone = replace(ask, gamma=PLAIN, drafter=DrafterKind.NONE)
                plain_runs[number] = await complete(orchestrator, alone)
            plain = plain_runs[number]
            for name, policy in POLICIES.items():
                salt = f"{turn} {number} {name}"  # its own past outputs would be proposed to it
                run = await complete(orchestrator, replace(ask, gamma=policy, cache_salt=salt))
                compared, equal = compared + 1, equal + (run.token_ids == plain.token_ids)
                if turn == WARM_UP:
                    ratios[name].append(run.tokens_per_s / plain.tokens_per_s)
                    cycles[name] += run.cycles
                    by_model[name] += run.model_cycles
    return {
        "speed_over_plain": {name: statistics.geometric_mean(found) for name, found in ratios.items()},
        "model_cycles": {name: by_model[name] / cycles[name] for name in POLICIES},
        "compared": compared,
        "equal": equal,
    }


@asynccontextmanager
async def orchestrating(redis_url: str, target: str, draft: str) -> AsyncIterator[Orchestrator]:
    """Run an orchestrator with these workers until the block ends."""
    announcers = [Announcer(redis_url, "target", target), Announcer(redis_url, "draft", draft)]
    for announcer in announcers:
        await announcer.start()
    orchestrator = await Orchestrator.start(OrchestratorSettings(redis_url=redis_url))
    try:
        yield orchestrator
    finally:
        await orchestrator.close()
        for announcer in announcers:
            await announcer.withdraw()


async def run(options: Any) -> dict[str, Any]:
    """Measure at each distance; return the result, JSON-ready."""
    texts, points = prompts("mixed", options.prompts), []
    with tempfile.TemporaryDirectory() as folder:
        redis = RedisServer.start(Path(folder))
        try:
            async with (
                simulated_worker("target", options.target_ms, options.row_ms) as target,
                simulated_worker("draft", options.draft_ms, 0.0) as draft,
            ):
                for delay_ms in options.delays:
                    async with (
                        relay(draft, delay_ms / 1e3) as far,
                        orchestrating(redis.url, target, far) as orchestrator,
                    ):
                        for temperature in options.temperatures:
                            found = await measure(orchestrator, texts, temperature, options.tokens)
                            points.append({"delay_ms": delay_ms, "temperature": temperature, **found})
                            print(f"{delay_ms:g} ms, temperature {temperature:g}:", _row(found), flush=True)
        finally:
            redis.stop()
    return {"settings": settings_of(options), "points": points}


def _row(found: dict[str, Any]) -> str:
    speeds = ", ".join(f"{speed:.2f}x at {name}" for name, speed in found["speed_over_plain"].items())
    shares = ", ".join(f"{share:.0%}" for share in found["model_cycles"].values())
    return f"{speeds}; by the draft model {shares} of cycles; {found['equal']}/{found['compared']} equal"


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target-ms", type=float, default=25.0, help="a forward of the target")
    parser.add_argument("--row-ms", type=float, default=0.1, help="each of its tokens, in addition")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="a forward of the draft model")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 2.0, 10.0, 30.0], help="one way, ms")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    result = run_or_exit(run(options))
    print(f"written: {write_result('distance', result, options.out)}")
    sys.exit(any(point["compared"] != point["equal"] for point in result["points"]))


if __name__ == "__main__":
    main()
