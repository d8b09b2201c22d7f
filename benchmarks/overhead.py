"""What the processes beside the forward cost: tokens per second and CPU per token, from 1 to 512 streams.

    python -m benchmarks.overhead                                     # half an hour on two cores
    python -m benchmarks.overhead --streams 1,64 --loads "plain;vllm"
    python -m benchmarks.overhead --target-ms 20 --loads "plain;gamma 4"  # a GPU's forwards, simulated

The model has one layer of 64 and 2,048 tokens, drawn at random: it computes almost nothing. Each stream
asks for completions of 200 tokens at temperature 1, one after another, over HTTP as events or over gRPC.
vLLM's own server joins if `make vllm` has installed it. CPU seconds are those of /proc, by kind of process;
those of this process, which plays the clients, are left out.

With `--target-ms` workers sleep until a forward has taken so long, which leaves the processor to the others,
as a GPU does. Such figures are simulated, and vLLM has none. Their bound is the speed of a target that never
waits, with all streams in each of its steps and every proposal accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.cluster import run_or_exit, running_cluster, running_server
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.simulated import simulated_worker
from gammaray import AsyncClient
from orchestrator.launcher.redis_server import RedisServer
from services.demo_pair import TARGET_DIR

TOKENS = 200
MODEL = "tiny"
PROMPT = "def main():\n"
VLLM = Path(".venv-vllm/bin/python").absolute()
START_S, COMPLETION_S = 180.0, 300.0
MIN_COMPLETIONS = 64
"""Of a load: with few streams each asks for several, one after another."""

ADAPTIVE = "adaptive"

KINDS = {
    "orchestrator": ("Orchestrator", "APIServer", "api_server"),
    "target": ("TargetWorker", "target_worker", "simulated target", "EngineCore"),
    "draft": ("DraftWorker", "draft_worker", "simulated draft"),
    "proxy": ("haproxy", "Proxy"),
    "redis": ("redis-server", "valkey-server"),
}
"""By words of their command lines; vLLM's server counts as an orchestrator, its engine as a target."""


@dataclass(frozen=True)
class Load:
    """What is asked of which server.

    Attributes:
        gamma: Of the requests; None: the server knows no gamma.
        api: "http" or "grpc".
        options: Of `gammaray up`.
        has_draft: Whether the model is on a draft worker, too.
    """

    gamma: int | str | None
    api: str = "http"
    options: tuple[str, ...] = ()
    store: bool = True
    has_draft: bool = False


LOADS: Mapping[str, Load] = {
    "plain": Load(0),
    "plain, grpc": Load(0, "grpc"),
    "plain, not stored": Load(0, store=False),
    "plain, two orchestrators": Load(0, options=("--orchestrators", "2")),
    "gamma 4": Load(4, has_draft=True),
    "adaptive": Load(ADAPTIVE, has_draft=True),
    "vllm": Load(None),
}


@dataclass
class Seen:
    """What the clients of a load saw.

    Attributes:
        first_s: Seconds from each request to its first event.
        gaps_s: Seconds between the events of a stream.
    """

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def note(self, asked: float, arrivals: list[float]) -> None:
        """Add a completion."""
        self.first_s.append(arrivals[0] - asked)
        self.gaps_s += [later - sooner for sooner, later in itertools.pairwise(arrivals)]


def make_model(folder: Path) -> Path:
    """Write the model and return its directory."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET_DIR).save_pretrained(folder)
    return folder


async def complete_over_http(url: str, load: Load, number: int, seen: Seen) -> None:
    """Stream a completion; RuntimeError if it is not answered by events."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.0}
    body |= {"seed": number, "ignore_eos": True, "stream": True}
    if load.gamma is not None:
        body |= {"store": load.store, "gammaray": {"gamma": load.gamma}}
    payload, address = json.dumps(body).encode(), urlsplit(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    asked, arrivals = time.perf_counter(), list[float]()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
        status = await reader.readline()
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    finally:
        writer.close()
    if b" 200 " not in status or not arrivals:
        raise RuntimeError(f"{url}: {status.decode().strip()}, {len(arrivals)} events")
    seen.note(asked, arrivals)


async def complete_over_grpc(client: AsyncClient, load: Load, number: int, seen: Seen) -> None:
    """Stream a completion."""
    asked, arrivals = time.perf_counter(), list[float]()
    options: Any = {"gamma": load.gamma, "store": load.store, "temperature": 1.0, "seed": number}
    async for _ in client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, **options):
        arrivals.append(time.perf_counter())
    seen.note(asked, arrivals)


def cpu_seconds() -> dict[str, float]:
    """Return the CPU seconds so far of all processes below this one, by kind."""
    found: dict[str, float] = defaultdict(float)
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[kind_of(process)] += times.user + times.system
    return found


def kind_of(process: psutil.Process) -> str:
    """Return the kind of a process; what serves no request itself, such as Ray's own processes, is other."""
    command = " ".join(process.cmdline())
    return next((kind for kind, words in KINDS.items() if any(word in command for word in words)), "other")


async def measure(load: Load, url: str, client: AsyncClient | None, streams: int) -> dict[str, Any]:
    """Let so many streams run at once; return speed, CPU per token and delays."""
    seen, each = Seen(), max(1, MIN_COMPLETIONS // streams)

    async def stream(number: int) -> None:
        for turn in range(each):
            seed = number * each + turn
            async with asyncio.timeout(COMPLETION_S):
                if client is not None:
                    await complete_over_grpc(client, load, seed, seen)
                else:
                    await complete_over_http(url, load, seed, seen)

    before, began = cpu_seconds(), time.perf_counter()
    await asyncio.gather(*map(stream, range(streams)))
    seconds, tokens = time.perf_counter() - began, streams * each * TOKENS
    spent = {kind: total - before.get(kind, 0.0) for kind, total in cpu_seconds().items()}
    return {
        "streams": streams,
        "tokens_per_s": tokens / seconds,
        "cpu_ms_per_token": {kind: 1e3 * used / tokens for kind, used in spent.items()},
        "first_event_ms": percentiles(seen.first_s),
        "gap_ms": percentiles(seen.gaps_s),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and two high percentiles in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {f"p{percent}": 1e3 * cuts[percent - 1] for percent in (50, 90, 99)}


@asynccontextmanager
async def serving(load: Load, model: Path, options: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """Run the server of a load until the block ends; yield its URL and its gRPC address."""
    async with AsyncExitStack() as stack:
        if load.gamma is None:
            command = [
                str(VLLM),
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(model),
            ]
            command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", "1024"]
            url = await stack.enter_async_context(
                running_server([*command, "--max-num-seqs", "512"], START_S)
            )
            yield url, ""
            return
        more = ["--target", str(model), "--draft", str(model), "--engine", options.engine, *load.options]
        numbers = ["--draft-workers", "1" if load.has_draft else "0"]
        if options.target_ms:
            redis = RedisServer.start(model.parent / "redis")
            stack.callback(redis.stop)
            own = ["--model", str(model), "--redis-url", redis.url]
            workers = [simulated_worker("target", options.target_ms, options.row_ms, *own)]
            if load.has_draft:
                workers.append(simulated_worker("draft", options.draft_ms, 0.0, *own))
            for worker in workers:
                await stack.enter_async_context(worker)
            numbers = ["--target-workers", "0", "--draft-workers", "0", "--redis-url", redis.url]
        cluster = await stack.enter_async_context(running_cluster(*more, *numbers))
        yield f"http://{cluster.http_address}", cluster.grpc_address


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each load; return the result, JSON-ready."""
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / MODEL)
        for name in options.loads:
            load = LOADS[name]
            async with serving(load, model, options) as (url, address), AsyncExitStack() as stack:
                client = None
                if load.api == "grpc":
                    client = await stack.enter_async_context(AsyncClient(address))
                await measure(load, url, client, 4)  # warms up
                for streams in options.streams:
                    point = {"load": name, **await measure(load, url, client, streams)}
                    if bound := simulated_bound(load, streams, options):
                        point["of_bound"] = point["tokens_per_s"] / bound
                    points.append(point)
                    print(_row(point), flush=True)
    return {"settings": settings_of(options), "points": points}


def simulated_bound(load: Load, streams: int, options: argparse.Namespace) -> float:
    """Return the tokens per second of a simulated target that never waits; 0: forwards are not simulated."""
    if not options.target_ms or not isinstance(load.gamma, int):
        return 0.0
    tokens = streams * (load.gamma + 1)
    return 1e3 * tokens / float(options.target_ms + options.row_ms * tokens)


def _row(point: dict[str, Any]) -> str:
    spent = point["cpu_ms_per_token"]
    parts = ", ".join(f"{kind} {used:.3f}" for kind, used in sorted(spent.items()) if used >= 0.0005)
    first, gap = point["first_event_ms"], point["gap_ms"]
    return (
        f"{point['load']}, {point['streams']} streams: {point['tokens_per_s']:,.0f} tok/s, "
        f"{sum(spent.values()):.3f} ms of CPU a token ({parts}), first event {first['p50']:.0f} ms "
        f"(p99 {first['p99']:.0f}), gap {gap['p50']:.1f} ms (p99 {gap['p99']:.1f})"
        + (f", {point['of_bound']:.0%} of the bound" if "of_bound" in point else "")
    )


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    known = [name for name, load in LOADS.items() if load.gamma is not None or VLLM.exists()]
    parser.add_argument("--loads", type=lambda text: text.split(";"), default=known, help="separated by ;")
    numbers = [1, 8, 32, 64, 128, 256, 512]
    parser.add_argument("--streams", type=lambda text: [int(one) for one in text.split(",")], default=numbers)
    parser.add_argument("--target-ms", type=float, help="what a forward of the target takes")
    parser.add_argument("--draft-ms", type=float, default=4.0, help="what one of a simulated draft takes")
    parser.add_argument("--row-ms", type=float, default=0.05, help="each token of the target's, in addition")
    parser.add_argument("--engine", default="auto", help="of gammaray up; vllm needs .venv-vllm's Python")
    options = parser.parse_args()
    if options.target_ms:
        known = [name for name in known if name != "vllm"]
        options.loads = [name for name in options.loads if name != "vllm"]
    if unknown := set(options.loads) - set(known):
        parser.error(f"--loads: got {', '.join(unknown)}, allowed: {'; '.join(known)}")
    print(f"written: {write_result('overhead', run_or_exit(run(options)), options.out)}")


if __name__ == "__main__":
    main()
