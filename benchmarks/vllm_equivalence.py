"""Equal tokens with vLLM as the engine, through the whole cluster.

    python -m benchmarks.vllm_equivalence --head benchmarks/heads/smollm2

- Temperature 0: the tokens of gammaray equal those of vLLM alone, with its own scheduler and sampler.
- Temperature 1, coupled: for one seed the tokens are those of gamma 0, with gamma 3, 8, adaptive, without a
  drafter, with eight requests at once, and with a head in the target.
- Gamma 0 on gammaray's CPU engine has the tokens of vLLM, at temperature 0 and 1.

The tasks are those of `benchmarks.equivalence`. vLLM may round a row by the number of rows that come with it,
and two engines add in different orders. The *noise* is the largest difference of a gap between vLLM's two
largest logits, computed by one forward per token and by one forward over all tokens. Where two completions
took one of the two largest logits each, at temperature 1 with the session's noise added, and the gap between
them is not above the noise, they count as tied, and their rest is not compared. At temperature 1 the gap is
that of the logits of `transformers`.

Prints counts and the first difference (prompt:token), writes them with their provenance; exits with 1 when a
token differs. Needs an environment with vLLM (`make vllm`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.baselines import Gaps, Generated, running_baselines
from benchmarks.cluster import connected, run_or_exit
from benchmarks.equivalence import (
    AT_ONCE,
    WITH_DRAFT,
    Asks,
    Made,
    chat_prompts,
    comparison_table,
    completed,
    count,
    generated,
    noise_of,
    ties,
)
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray import AsyncClient
from gammaray.bench.measure import first_difference
from gammaray.bench.prompts import fingerprint
from gammaray.client.request import GenerateOptions
from gammaray.demo_pair import resolve_model
from services.engine.sampling.noise import Noise

START_TIMEOUT_S = 600.0
GREEDY: dict[str, GenerateOptions] = {"gamma 0": {"gamma": 0}, "adaptive": {}}
WITH_HEAD: dict[str, GenerateOptions] = {
    "head, gamma 3": {"drafter": "head", "gamma": 3},
    "head, adaptive": {"drafter": "head"},
}


class NoisedGaps:
    """The logits of `transformers` in float32, with gammaray's noise."""

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def first_two(self, context: Sequence[int], seed: int) -> tuple[int, int, float]:
        """Return the two tokens with the largest noised logits after some tokens, and their difference."""
        logits = self._model(torch.tensor([list(context)])).logits[0, -1].double()
        noised = logits + Noise(seed, 0, len(logits)).gumbel(len(context), 1)[0]
        values, tokens = noised.topk(2)
        first, second = tokens.tolist()
        return first, second, float(values[0] - values[1])


@dataclass
class Comparisons:
    """Counts of equal, tied and different completions.

    Args:
        model: Directory or hub name of the target.
        asks: What is completed at temperature 0.
        sampled: What is completed at temperature 1; the number of each is its seed.
        plain: Completions of vLLM alone.
        noise: Gaps up to this are ties.
        began: When the first one began.
    """

    model: str
    asks: Asks
    sampled: Asks
    plain: list[Generated]
    noise: float
    began: float
    counts: list[dict[str, Any]] = field(default_factory=list)
    margins: NoisedGaps | None = None

    def add(self, one: dict[str, Any]) -> None:
        """Keep a comparison and print it."""
        self.counts.append(one)
        seconds = time.monotonic() - self.began
        equal = f"{one['equal']} of {one['completions']}, {len(one['tied'])} tied"
        print(f"{seconds:5.0f} s  {one['comparison']}: {equal}", flush=True)

    def add_greedy(self, name: str, got: Sequence[Made]) -> None:
        """Compare completions at temperature 0 with those of vLLM alone."""
        expected = [Made(one.token_ids) for one in self.plain]
        gaps = [one.gaps for one in self.plain]
        self.add(count(f"temperature 0, {name} = vLLM alone", got, expected, gaps, self.noise))

    def add_sampled(self, name: str, got: Sequence[Made], expected: Sequence[Made]) -> None:
        """Compare completions at temperature 1."""
        gaps = [self._gaps(number, *pair) for number, pair in enumerate(zip(got, expected, strict=True))]
        self.add(count(f"temperature 1, {name}", got, expected, gaps, self.noise))

    def _gaps(self, number: int, ours: Made, theirs: Made) -> Gaps | None:
        """Return the gap at the first difference; None if there is none."""
        at = first_difference(ours.token_ids, theirs.token_ids)
        if at is None or at >= len(theirs.token_ids):
            return None
        self.margins = self.margins or NoisedGaps(self.model)
        prompt = self.sampled.prompts[number]
        assert not isinstance(prompt, str)
        *two, gap = self.margins.first_two((*prompt, *theirs.token_ids[:at]), number)
        other = set(two) - {theirs.token_ids[at]}
        rival = other.pop() if len(other) == 1 else -1  # -1: neither is theirs
        return Gaps((*[inf] * at, gap), (*[-1] * at, rival), self.noise)


@asynccontextmanager
async def _cluster(
    engine: str, target: str, draft: str | None, head: str | None = None
) -> AsyncIterator[AsyncClient]:
    os.environ["GAMMARAY_ENGINE"] = engine
    async with connected(target, draft, head, timeout_s=START_TIMEOUT_S) as client:
        yield client


async def _compare(given: argparse.Namespace, asks: Asks) -> Comparisons:
    sampled = replace(asks, prompts=asks.prompts[: given.sampled])
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {what}", flush=True)

    made: dict[str, list[Made]] = {}
    greedy: dict[str, list[Made]] = {}
    async with (
        running_baselines(given.target, program="vllm") as alone,
        _cluster("vllm", given.target, given.draft) as client,
    ):
        generating = asyncio.create_task(generated(alone, asks))  # meanwhile the cluster works
        try:
            zero = await completed(client, sampled, 1.0, gamma=0, cache_salt="plain")
            say("gamma 0")
            for name, how in WITH_DRAFT.items():
                made[name] = await completed(client, sampled, 1.0, cache_salt=name, **how)
                say(name)
            name, loaded = f"adaptive, {AT_ONCE} at once", replace(sampled, at_once=AT_ONCE)
            made[name] = await completed(client, loaded, 1.0, cache_salt=name)
            say(name)
            for name, how in GREEDY.items():
                greedy[name] = await completed(client, asks, 0.0, cache_salt=f"greedy, {name}", **how)
                say(f"greedy, {name}")
            plain = await generating
        finally:
            generating.cancel()
    found = Comparisons(resolve_model(given.target, "target"), asks, sampled, plain, noise_of(plain), began)
    for name, ours in made.items():
        found.add_sampled(f"{name} = gamma 0", ours, zero)
    for name, ours in greedy.items():
        found.add_greedy(name, ours)
    if given.head:
        async with _cluster("vllm", given.target, None, given.head) as client:
            for name, how in WITH_HEAD.items():
                ours = await completed(client, sampled, 1.0, cache_salt=name, **how)
                found.add_sampled(f"{name} = gamma 0", ours, zero)
            found.add_greedy("head, gamma 3", await completed(client, asks, 0.0, drafter="head", gamma=3))
    async with _cluster("native", given.target, None) as client:
        ours = await completed(client, sampled, 1.0, gamma=0, drafter="none")
        found.add_sampled("gamma 0 on the CPU engine = gamma 0 on vLLM", ours, zero)
        found.add_greedy("gamma 0, CPU engine", await completed(client, asks, 0.0, gamma=0, drafter="none"))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="build/models/smollm2", help="directory or hub name")
    parser.add_argument("--draft", default="build/models/smollm2", help="directory or hub name")
    parser.add_argument("--head", default="", help="EAGLE-3 or other head of the target; empty: none")
    parser.add_argument("--categories", default="chat,code,maths,translation", help="of the tasks")
    parser.add_argument("--prompts", type=int, default=10, help="per category; default 10")
    parser.add_argument("--sampled", type=int, help="how many of all at temperature 1; default: all")
    parser.add_argument("--tokens", type=int, default=32, help="of each completion; default 32")
    parser.add_argument("--at-once", type=int, default=4, help="requests in flight; default 4")
    return parser


def main() -> None:
    """Command line of this module."""
    given = _parser().parse_args()
    model = resolve_model(given.target, "target")
    asked, _ = chat_prompts(model, given.categories.split(","), given.prompts)
    found = run_or_exit(_compare(given, Asks(tuple(asked), given.tokens, True, given.at_once)))
    Console(width=120).print(comparison_table(found.counts))
    result = {
        "settings": settings_of(given),
        "workload_fingerprint": fingerprint([" ".join(map(str, one)) for one in asked]),
        "comparisons": found.counts,
        "ties": ties(found.plain),
    }
    print(f"written: {write_result('vllm-equivalence', result, given.out)}")
    sys.exit(any(one["different"] for one in found.counts))


if __name__ == "__main__":
    main()
