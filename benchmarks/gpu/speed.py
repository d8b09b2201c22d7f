"""gammaray on vLLM compared with vLLM itself: equal greedy tokens, tokens per second, the time of a cycle.

Each system has the GPU alone: vLLM's server, plain and with its own speculation by the same drafters, without
and with the plug-in, and gammaray's whole stack with vLLM as the engine: without a drafter, with a draft
worker on the same GPU, with a head in the target. The greedy tokens of vLLM's server are compared with its
plain ones, gammaray's gamma 0 with those, too, and other gammas with gamma 0; a difference has its margin,
the difference of the two tokens' log-probabilities.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
from gammaray_vllm import VARIABLE
from transformers import AutoTokenizer

from benchmarks.cluster import ClusterError, running_cluster, running_server
from benchmarks.peers.stacks import cycles_of
from benchmarks.workloads import prompts
from gammaray import AsyncClient
from gammaray.bench.measure import first_difference, measure, speeds
from gammaray.bench.systems import Arrival, Ask, Sample, Stack, System
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
    given: argparse.Namespace, drafter: Mapping[str, Any] | None, is_coupled: bool
) -> AbstractAsyncContextManager[str]:
    """Run vLLM's server until the block ends, with the plug-in if `is_coupled`; yield its URL."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.target_path]
    command += ["--dtype", given.dtype, "--gpu-memory-utilization", str(given.memory_share)]
    if given.tiny:
        command.append("--enforce-eager")  # a CPU compiles for minutes
    if drafter is not None:
        command += ["--speculative-config", json.dumps(drafter)]
    os.environ[VARIABLE] = str(int(is_coupled))
    return running_server(command, _START_TIMEOUT_S)


async def greedy_tokens(system: System, asks: Sequence[Ask]) -> Tokens:
    """Return a system's completions, one after another."""
    return [(await system.sample(ask)).token_ids for ask in asks]


async def rates(system: System, asks: Sequence[Ask], given: argparse.Namespace) -> dict[str, float]:
    """Return a system's tokens per second by temperature and completions in flight."""
    found = {}
    for t in given.temperatures:
        at_t = [replace(ask, temperature=t, seed=seed) for seed, ask in enumerate(asks)]
        for batch in given.batches:
            samples = await measure([system], at_t, given.repetitions, lambda: None, batch)
            speed = round(statistics.median(speeds(samples[system.name])), 2)
            found[f"T {t:g}, {batch} at a time"] = speed
            print(f"{system.name}: T {t:g}, {batch} at a time, {speed} tokens/s", flush=True)
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


async def run_vllm(
    given: argparse.Namespace,
    asks: Sequence[Ask],
    systems: dict[str, Any],
    plain: Tokens,
    name: str,
    drafter: Mapping[str, Any] | None,
    is_coupled: bool,
) -> None:
    """Measure vLLM's server; `plain` gets its greedy tokens if it is empty."""
    async with (
        running_vllm(given, drafter, is_coupled) as url,
        httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S) as client,
    ):
        system = VllmServer(name, client, given.target_path)
        tokens = await greedy_tokens(system, asks)
        plain += [] if plain else tokens
        equal = sum(one == other for one, other in zip(tokens, plain, strict=True))
        print(f"{name}: {equal} of {len(asks)} greedy completions equal those of {VLLM}", flush=True)
        systems[name] = {"equal": equal, "tokens_per_s": await rates(system, asks, given)}


async def run_gammaray(
    given: argparse.Namespace,
    asks: Sequence[Ask],
    systems: dict[str, Any],
    plain: Tokens,
    kind: str,
    drafter: Sequence[str],
) -> None:
    """Measure a cluster: gamma 0, and with a drafter the fixed gamma and the adaptive one."""
    # With a draft worker, two processes share the GPU's memory.
    share = given.memory_share / 2 if kind == "draft" else given.memory_share
    os.environ["GAMMARAY_CACHE_MEMORY_SHARE"] = str(share)
    roles = ("target", "draft") if kind == "draft" else ("target",)
    options = ("--engine", "vllm", "--target", given.target, "--dtype", given.dtype, *drafter)
    gammas: list[int | str] = [0, given.gamma, "adaptive"] if kind else [0]
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
            systems[name] = {"exactness": exactness, "cycle": cycle, "tokens_per_s": speed}


async def run(given: argparse.Namespace, found: dict[str, Any]) -> None:
    """Measure everything, in the order of its worth; `found` gets `systems`.

    Raises:
        ClusterError: vLLM's plain server failed.
    """
    tokenizer = AutoTokenizer.from_pretrained(given.target_path)
    texts = prompts(given.workload, given.prompts)
    asks = [Ask(tuple(tokenizer.encode(text)), given.tokens) for text in texts]
    systems = found["systems"] = dict[str, Any]()
    common = (given, asks, systems, Tokens())
    drafters: dict[str, Mapping[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    }
    clusters = {"": ("--draft-workers", "0")}
    if given.draft:
        drafters["draft"] = {"method": "draft_model", "model": given.draft_path}
        clusters["draft"] = ("--draft", given.draft)
    if given.head:
        drafters["head"] = drafter_config(given.head)
        clusters["head"] = ("--head", given.head)
    await run_vllm(*common, VLLM, None, False)
    work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        f"gammaray-{kind or 0}": partial(run_gammaray, *common, kind, how) for kind, how in clusters.items()
    }
    work["plug-in"] = partial(run_vllm, *common, "plug-in", None, True)
    for kind, how in drafters.items():
        drafter = {**how, "num_speculative_tokens": given.gamma}
        for program, is_coupled in ((VLLM, False), ("plug-in", True)):
            name = f"{program}-{kind}-{given.gamma}"
            work[name] = partial(run_vllm, *common, name, drafter, is_coupled)
    for name, measured in work.items():
        try:
            await measured()
        except (ClusterError, GammarayError, httpx.HTTPError) as error:
            systems[name] = {"error": str(error) or repr(error)}
            print(f"{name}: not measured: {error}", flush=True)


def summary(found: dict[str, Any]) -> Iterator[str]:
    """Yield lines of the table at the end."""
    for name, system in found["systems"].items():
        if "error" in system:
            yield f"{name}: failed: {system['error'].strip().splitlines()[-1]}"
            continue
        equal = system["equal"] if "equal" in system else system["exactness"]["equal"]
        speed = "; ".join(f"{load} {value:g}" for load, value in system["tokens_per_s"].items())
        yield f"{name}: {equal} equal; tokens/s: {speed}"
