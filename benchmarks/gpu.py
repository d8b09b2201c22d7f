"""gammaray on vLLM compared with vLLM itself, on one GPU: equal tokens first, then the time.

Each system has the GPU alone: vLLM's server, plain and with its own speculation by the same drafters, then
gammaray's whole stack with vLLM as the engine: without a drafter, with a draft worker on the same GPU, with a
head in the target. Of each the greedy tokens are compared first, gamma 0 with plain vLLM's, other gammas with
gamma 0's; a difference is printed with its margin, the difference of the two tokens' log-probabilities. Then
come tokens per second by number of completions in flight, and the time of a cycle and of the target's step.

    python -m benchmarks.gpu --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --head AngelSlim/Qwen3-8B_eagle3
    python -m benchmarks.gpu --tiny        # the demo pair on vLLM's CPU build: shows that the program works
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.cluster import ClusterError, run_or_exit, running_cluster, running_server
from benchmarks.peers.stacks import cycles_of
from benchmarks.provenance import make_parser, write_result
from benchmarks.workloads import WORKLOADS, prompts
from gammaray import AsyncClient
from gammaray.bench.measure import first_difference, measure, speeds
from gammaray.bench.systems import Arrival, Ask, Sample, Stack, System
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError
from services.vllm.heads import drafter_config

VLLM = "vllm"
"""Name of its plain decoding."""
_START_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 900.0
_NEAR_TOKENS = 20
"""Alternatives among which the margin of a difference is looked for."""

Tokens = list[tuple[int, ...]]
"""The tokens of each completion."""


class VllmServer:
    """Completions of vLLM's own server; implements `System`."""

    def __init__(self, name: str, client: httpx.AsyncClient, model: str) -> None:
        self.name = name
        self._client, self._model = client, model

    async def sample(self, ask: Ask) -> Sample:
        """Return one completion.

        Raises:
            ClusterError: The server refused it.
        """
        token_ids: list[int] = []
        arrivals: list[Arrival] = []
        body = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "ignore_eos": ask.ignore_eos,
            "cache_salt": secrets.token_hex(8),  # A fresh salt prevents prefix cache hits.
            "return_token_ids": True,
            "stream": True,
        }
        started = time.perf_counter()
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ClusterError(f"{self.name}: {response.status_code} {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                    if new := choice.get("token_ids"):
                        arrivals.append((time.perf_counter() - started, len(new)))
                        token_ids += new
        return Sample(tuple(token_ids), time.perf_counter() - started, tuple(arrivals))


def running_vllm(
    given: argparse.Namespace, drafter: Mapping[str, Any] | None
) -> AbstractAsyncContextManager[str]:
    """Run vLLM's server until the block ends; yield its URL."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.target_path]
    command += ["--dtype", given.dtype, "--gpu-memory-utilization", str(given.memory_share)]
    if given.tiny:
        command.append("--enforce-eager")  # a CPU compiles for minutes
    if drafter is not None:
        command += ["--speculative-config", json.dumps(drafter)]
    return running_server(command, _START_TIMEOUT_S)


async def greedy_tokens(system: System, asks: Sequence[Ask]) -> Tokens:
    """Return a system's completions, one after another."""
    return [(await system.sample(ask)).token_ids for ask in asks]


async def rates(system: System, asks: Sequence[Ask], given: argparse.Namespace) -> dict[int, float]:
    """Return a system's tokens per second by completions in flight."""
    found = {}
    for batch in given.batches:
        samples = await measure([system], asks, given.repetitions, lambda: None, batch)
        found[batch] = round(statistics.median(speeds(samples[system.name])), 2)
        print(f"{system.name}: {batch} at a time, {found[batch]} tokens/s", flush=True)
    return found


async def cycle_times(client: AsyncClient, stack: Stack, ask: Ask) -> dict[str, float]:
    """Return the medians of one completion's cycles, in ms, without the one that reads the prompt."""
    cycles = await cycles_of(client, await stack.sample(ask))
    later = [cycle for cycle in cycles[1:] if cycle.target is not None]
    if not later:
        return {}
    times = {
        "cycle": [cycle.total_s for cycle in later],
        "propose": [cycle.propose_s for cycle in later],
        "verify": [cycle.verify_s for cycle in later],
        "target_step": [cycle.target.compute_s for cycle in later if cycle.target is not None],
    }
    rounded = {f"{name}_ms": round(statistics.median(found) * 1e3, 3) for name, found in times.items()}
    return {**rounded, "tokens_per_cycle": round(statistics.mean(cycle.emitted for cycle in later), 3)}


async def margin(client: AsyncClient, ask: Ask, ours: Sequence[int], theirs: Sequence[int]) -> dict[str, Any]:
    """Return where two completions differ, and the margin of their tokens there, by gamma 0 alone."""
    at = first_difference(ours, theirs)
    assert at is not None
    if at >= min(len(ours), len(theirs)):
        return {"token": at, "margin": None}
    prompt = (*ask.prompt, *ours[:at])
    found: dict[int, float] = {}
    async for chunk in client.generate(
        prompt, max_tokens=1, temperature=0, gamma=0, logprobs=_NEAR_TOKENS, ignore_eos=True
    ):
        for token in chunk.tokens:
            found |= {top.token_id: top.logprob for top in token.top_logprobs or ()}
    both = [found.get(tokens[at]) for tokens in (ours, theirs)]
    known = None if None in both else round(abs(both[0] - both[1]), 6)  # type: ignore[operator]
    return {"token": at, "margin": known}


async def compared(
    client: AsyncClient, asks: Sequence[Ask], name: str, ours: Tokens, reference: str, theirs: Tokens
) -> dict[str, Any]:
    """Return how many greedy completions are equal, and the margins of the others."""
    differing = [
        {"prompt": at, **await margin(client, ask, one, other)}
        for at, (ask, one, other) in enumerate(zip(asks, ours, theirs, strict=True))
        if one != other
    ]
    equal = len(asks) - len(differing)
    print(f"{name}: {equal} of {len(asks)} greedy completions equal those of {reference}", flush=True)
    for each in differing:
        print(f"  prompt {each['prompt']}: token {each['token']}, margin {each['margin']}", flush=True)
    return {"reference": reference, "equal": equal, "differing": differing}


async def run_vllm(given: argparse.Namespace, asks: Sequence[Ask]) -> tuple[dict[str, Any], Tokens]:
    """Measure vLLM's server, plain and with each drafter; return also its plain greedy tokens."""
    modes: dict[str, Mapping[str, Any] | None] = {VLLM: None}
    if given.draft:
        draft = {"method": "draft_model", "model": given.draft_path, "num_speculative_tokens": given.gamma}
        modes[f"{VLLM}-draft-{given.gamma}"] = draft
    if given.head:
        head = {**drafter_config(given.head), "num_speculative_tokens": given.gamma}
        modes[f"{VLLM}-head-{given.gamma}"] = head
    found: dict[str, Any] = {}
    plain: Tokens = []
    for name, drafter in modes.items():
        try:
            async with (
                running_vllm(given, drafter) as url,
                httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S) as client,
            ):
                system = VllmServer(name, client, given.target_path)
                tokens = await greedy_tokens(system, asks)
                plain = plain or tokens
                equal = sum(one == other for one, other in zip(tokens, plain, strict=True))
                print(f"{name}: {equal} of {len(asks)} greedy completions equal those of {VLLM}", flush=True)
                found[name] = {"equal": equal, "tokens_per_s": await rates(system, asks, given)}
        except ClusterError as error:
            if drafter is None:
                raise
            found[name] = {"error": str(error)}
            print(f"{name}: not measured: {error}", flush=True)
    return found, plain


async def run_gammaray(
    given: argparse.Namespace, asks: Sequence[Ask], kind: str, drafter: Sequence[str], plain: Tokens
) -> dict[str, Any]:
    """Measure a cluster: gamma 0, and with a drafter the fixed gamma and the adaptive one."""
    # With a draft worker, two processes share the GPU's memory.
    share = given.memory_share / 2 if kind == "draft" else given.memory_share
    os.environ["GAMMARAY_CACHE_MEMORY_SHARE"] = str(share)
    roles = ("target", "draft") if kind == "draft" else ("target",)
    options = ("--engine", "vllm", "--target", given.target, "--dtype", given.dtype, *drafter)
    gammas: list[int | str] = [0, given.gamma, "adaptive"] if kind else [0]
    found: dict[str, Any] = {}
    reference, tokens = VLLM, plain
    async with (
        running_cluster(*options, timeout_s=_START_TIMEOUT_S) as cluster,
        AsyncClient(cluster.grpc_address) as client,
    ):
        await client.wait_ready(_START_TIMEOUT_S, roles=roles)
        for gamma in gammas:
            name = f"gammaray-{kind}-{gamma}" if kind else f"gammaray-{gamma}"
            stack = Stack(gamma, client, name=name)
            greedy = await greedy_tokens(stack, asks)
            exactness = await compared(client, asks, name, greedy, reference, tokens)
            if gamma == 0:
                reference, tokens = name, greedy
            cycle = await cycle_times(client, stack, asks[0])
            print(f"{name}: {cycle}", flush=True)
            speed = await rates(stack, asks, given)
            found[name] = {"exactness": exactness, "cycle": cycle, "tokens_per_s": speed}
    return found


async def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, and return the result."""
    tokenizer = AutoTokenizer.from_pretrained(given.target_path)
    texts = prompts(given.workload, given.prompts)
    asks = [Ask(tuple(tokenizer.encode(text)), given.tokens) for text in texts]
    systems, plain = await run_vllm(given, asks)
    clusters = {"": ("--draft-workers", "0")}
    if given.draft:
        clusters["draft"] = ("--draft", given.draft)
    if given.head:
        clusters["head"] = ("--head", given.head)
    for kind, drafter in clusters.items():
        try:
            systems |= await run_gammaray(given, asks, kind, drafter, plain)
        except (ClusterError, GammarayError) as error:
            if not kind:
                raise
            systems[f"gammaray-{kind}"] = {"error": str(error)}
            print(f"gammaray-{kind}: not measured: {error}", flush=True)
    options = {name: str(value) for name, value in vars(given).items()}
    return {"options": options, "systems": systems}


def main() -> None:
    """Parse the command line, measure, write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="demo", help="directory or hub name")
    parser.add_argument("--draft", default="", help="draft model; empty: none")
    parser.add_argument("--head", default="", help="EAGLE, EAGLE-3, Medusa or DFlash head; empty: none")
    parser.add_argument("--gamma", type=int, default=4, help="fixed draft length, for both servers")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64", help="completions in flight")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="length of each completion")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--workload", default="mixed", choices=WORKLOADS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-share", type=float, default=0.85, help="of the GPU's memory, for vLLM")
    parser.add_argument("--tiny", action="store_true", help="the demo pair on a CPU; no result is written")
    given = parser.parse_args()
    if given.tiny:
        given.target, given.draft, given.dtype = "demo", "demo", "float32"
        given.batches, given.prompts, given.tokens, given.repetitions = "1,2", 2, 16, 1
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    given.batches = [int(batch) for batch in given.batches.split(",")]
    try:
        given.target_path = resolve_model(given.target, "target")
        given.draft_path = resolve_model(given.draft, "draft") if given.draft else ""
    except GammarayError as error:
        parser.error(str(error))
    result = run_or_exit(run(given))
    if not given.tiny:
        print(f"written to {write_result('gpu', result, given.out)}")


if __name__ == "__main__":
    main()
