"""gammaray on vLLM beside vLLM itself, on one GPU: are the tokens equal, and what is the time.

Each system has the GPU alone: vLLM's server plain and with its own speculation by the same drafters, then
gammaray's whole stack with vLLM as the engine, without a drafter, with a draft worker on the same GPU and with a
head in the target. First the greedy tokens of all are compared: gamma 0 with plain vLLM's, other gammas with gamma
0's; a difference is printed with its margin, the difference of the two tokens' log-probabilities. Then tokens per
second by number of completions in flight, and the time of a cycle beside the target's step.

    python -m benchmarks.gpu --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --head AngelSlim/Qwen3-8B_eagle3
    python -m benchmarks.gpu --tiny        # the demo pair on vLLM's CPU build: shows that the program works
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from benchmarks.cluster import ClusterError, free_ports, run_or_exit, running_cluster
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.measure import Turn, first_difference, measure, speeds
from gammaray.bench.systems import Arrival, Ask, Sample, Stack, System
from gammaray.bench.workloads import prompts
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError
from services.vllm.heads import drafter_config

VLLM = "vllm"
GAMMA_0 = "gammaray-0"
_START_TIMEOUT_S = 900.0
_ANSWER_TIMEOUT_S = 900.0
_STOP_TIMEOUT_S = 60.0
_POLL_S = 0.5
_TRACE_TIMEOUT_S = 5.0
_NEAR_TOKENS = 20
"""Alternatives among which the margin of a difference is looked for."""

Greedy = dict[str, list[tuple[int, ...]]]


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


@asynccontextmanager
async def running_vllm(given: argparse.Namespace, drafter: Mapping[str, Any] | None) -> AsyncIterator[str]:
    """Run vLLM's server on a free port until the block ends; yield its URL.

    Raises:
        ClusterError: It ended, or was not ready in time.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", given.target_path]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", given.dtype]
    command += ["--gpu-memory-utilization", str(given.memory_share)]
    if drafter is not None:
        command += ["--speculative-config", json.dumps(drafter)]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + _START_TIMEOUT_S
            async with httpx.AsyncClient() as client:
                while not await _answers(client, f"{url}/health"):
                    if process.poll() is not None or time.monotonic() > deadline:
                        output.seek(0)
                        raise ClusterError(f"{' '.join(command)}\n{output.read()[-3000:]}")
                    await asyncio.sleep(_POLL_S)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def measured(system: System, asks: Sequence[Ask], given: argparse.Namespace) -> dict[str, Any]:
    """Return a system's greedy tokens, and its tokens per second by completions in flight."""
    greedy = [(await system.sample(ask)).token_ids for ask in asks]
    rates = {}
    for batch in given.batches:
        samples = await measure([system], asks, given.repetitions, lambda: None, batch)
        rates[batch] = statistics.median(speeds(samples[system.name]))
        print(f"{system.name}: {batch} at a time, {rates[batch]:.1f} tokens/s", flush=True)
    return {"greedy": greedy, "tokens_per_s": rates}


async def cycle_times(client: AsyncClient, stack: Stack, ask: Ask) -> dict[str, float]:
    """Return the medians of one completion's cycles, in ms, without the one that reads the prompt."""
    sample = await stack.sample(ask)
    deadline = time.monotonic() + _TRACE_TIMEOUT_S
    while True:  # records are written in the background
        cycles = await client.session_trace(sample.session_id)
        if sum(cycle.emitted for cycle in cycles) >= len(sample.token_ids) or time.monotonic() > deadline:
            break
        await asyncio.sleep(_POLL_S)
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
    """Return where two completions differ, and the margin of the tokens there by gamma 0 in a batch of one."""
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
    client: AsyncClient,
    asks: Sequence[Ask],
    name: str,
    ours: Sequence[Any],
    reference: str,
    theirs: Sequence[Any],
) -> dict[str, Any]:
    """Return how many greedy completions are equal, and the margins of the others."""
    differing = [
        {"prompt": at, **await margin(client, ask, one, other)}
        for at, (ask, one, other) in enumerate(zip(asks, ours, theirs, strict=True))
        if one != other
    ]
    print(f"{name}: {len(asks) - len(differing)} of {len(asks)} completions equal {reference}'s", flush=True)
    for each in differing:
        print(f"  prompt {each['prompt']}: token {each['token']}, margin {each['margin']}", flush=True)
    return {"reference": reference, "equal": len(asks) - len(differing), "differing": differing}


async def run_vllm(given: argparse.Namespace, asks: Sequence[Ask]) -> dict[str, Any]:
    """Measure vLLM's server, plain and with each drafter."""
    found = {}
    modes: dict[str, Mapping[str, Any] | None] = {VLLM: None}
    if given.draft:
        draft = {"method": "draft_model", "model": given.draft_path, "num_speculative_tokens": given.gamma}
        modes[f"{VLLM}-draft-{given.gamma}"] = draft
    if given.head:
        head = {**drafter_config(given.head), "num_speculative_tokens": given.gamma}
        modes[f"{VLLM}-head-{given.gamma}"] = head
    for name, drafter in modes.items():
        try:
            async with (
                running_vllm(given, drafter) as url,
                httpx.AsyncClient(base_url=url, timeout=_ANSWER_TIMEOUT_S) as client,
            ):
                found[name] = await measured(VllmServer(name, client, given.target_path), asks, given)
        except ClusterError as error:
            if drafter is None:
                raise
            print(f"{name}: not measured: {error}", flush=True)
    return found


async def run_gammaray(
    given: argparse.Namespace, asks: Sequence[Ask], drafter: Sequence[str], kind: str, plain: Sequence[Any]
) -> dict[str, Any]:
    """Measure a cluster with one drafter: gamma 0, the fixed gamma, and the adaptive one."""
    found: dict[str, Any] = {}
    # Target and draft worker share the GPU's memory.
    os.environ["GAMMARAY_CACHE_MEMORY_SHARE"] = str(
        given.memory_share / 2 if kind == "draft" else given.memory_share
    )
    options = ("--engine", "vllm", "--target", given.target, "--dtype", given.dtype, *drafter)
    async with running_cluster(*options) as cluster, AsyncClient(cluster.grpc_address) as client:
        await client.wait_ready(
            _START_TIMEOUT_S, roles=("target", "draft") if kind == "draft" else ("target",)
        )
        gammas: list[int | str] = [0] if not kind else [0, given.gamma, "adaptive"]
        for gamma in gammas:
            name = GAMMA_0 if not kind else f"gammaray-{kind}-{gamma}"
            stack = Stack(gamma, client, name=name)
            own = await measured(stack, asks, given)
            own["cycle"] = await cycle_times(client, stack, asks[0])
            print(f"{name}: {own['cycle']}", flush=True)
            reference, tokens = (
                (VLLM, plain) if gamma == 0 else (f"gammaray-{kind}-0", found_greedy(found, kind))
            )
            own["exactness"] = await compared(client, asks, name, own["greedy"], reference, tokens)
            found[name] = own
    return found


def found_greedy(found: Mapping[str, Any], kind: str) -> Sequence[Any]:
    """Return the greedy tokens of gamma 0 on the same cluster."""
    tokens: Sequence[Any] = found[f"gammaray-{kind}-0"]["greedy"]
    return tokens


async def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure everything, and return the result."""
    tokenizer = AutoTokenizer.from_pretrained(given.target_path)
    texts = prompts("mixed" if given.workload is None else given.workload, given.prompts)
    asks = [Ask(tuple(tokenizer.encode(text)), given.tokens) for text in texts]
    systems = await run_vllm(given, asks)
    plain = systems[VLLM]["greedy"]
    systems |= await run_gammaray(given, asks, ("--draft-workers", "0"), "", plain)
    if given.draft:
        systems |= await run_gammaray(given, asks, ("--draft", given.draft), "draft", plain)
    if given.head:
        systems |= await run_gammaray(given, asks, ("--head", given.head), "head", plain)
    for system in systems.values():
        del system["greedy"]
    return {"options": vars(given), "systems": systems}


def main() -> None:
    """Parse the command line, measure, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="demo", help="directory or hub name")
    parser.add_argument("--draft", default="", help="draft model; empty: none")
    parser.add_argument("--head", default="", help="EAGLE, EAGLE-3, Medusa or DFlash head; empty: none")
    parser.add_argument("--gamma", type=int, default=4, help="fixed draft length, for both servers")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64", help="completions in flight")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="length of each completion")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--workload", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-share", type=float, default=0.85, help="of the GPU's memory, for vLLM")
    parser.add_argument("--tiny", action="store_true", help="the demo pair on a CPU; no result is written")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    if given.tiny:
        given.target, given.draft, given.dtype = "demo", "demo", "float32"
        given.batches, given.prompts, given.tokens, given.repetitions = "1,2", 2, 16, 1
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
