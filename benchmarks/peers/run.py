"""The comparison: what is started, in what order it is asked, and the points of the result."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.progress import Progress

from benchmarks.baselines import REFERENCE, Peer, running_baselines
from benchmarks.cluster import ClusterError, connected
from benchmarks.overhead import kind_of
from benchmarks.peers.figures import equality, figures, table
from benchmarks.peers.llama_server import (
    LLAMA,
    connected_llama,
    llama_version,
    modes,
    running_llama,
)
from benchmarks.peers.stacks import SINGLE, VARIANTS, TracedStack
from benchmarks.prompts import Task, load_tasks
from gammaray import AsyncClient
from gammaray.bench.loops import loops_line, without_loops
from gammaray.bench.measure import PLAIN, Samples, measure
from gammaray.bench.prompts import fingerprint
from gammaray.bench.systems import Ask, Stack, System
from gammaray.client.request import GenerateOptions
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.types import MAX_GAMMA
from orchestrator.text.tokenizer import Tokenizer

_LOOKUP = 8
"""Tokens per prompt lookup of transformers, which takes fewer at the end."""

_ASSISTED = (4, 8)
_SPARE = 64
"""Positions of a slot of llama.cpp beyond prompt and completion, for drafts past the end."""

ALL = "all"
"""Name of a point that holds the prompts of all categories."""

_PEERS = (REFERENCE, f"lookup-{_LOOKUP}")
_WITH_DRAFT = tuple(f"assisted-{count}" for count in _ASSISTED)
SYSTEMS = (PLAIN, *VARIANTS, *SINGLE, *_PEERS, *_WITH_DRAFT, *modes(Path(), 1))
"""All that can be measured, and left out."""


@dataclass(frozen=True)
class Settings:
    """What is measured, as the options of `python -m benchmarks.peers` say; stands in the result file.

    Attributes:
        llama_server: Path of llama-server; None: llama.cpp is not measured.

    Raises:
        ValueError: A setting is not allowed.
    """

    target: str
    draft: str | None
    categories: tuple[str, ...]
    num_prompts: int
    max_tokens: int
    repetitions: int
    temperatures: tuple[float, ...]
    streams: tuple[int, ...]
    threads: int = 1
    seed: int = 0
    without: tuple[str, ...] = ()
    llama_server: str | None = None
    gguf: Path | None = None
    draft_gguf: Path | None = None
    head: str | None = None
    weights: str = "auto"
    dtype: str = "auto"
    ignore_eos: bool = True
    gammas: tuple[int, ...] = ()
    in_target: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        load_tasks(self.categories, self.num_prompts)
        least = {"tokens": self.max_tokens - 1, "repetitions": self.repetitions, "threads": self.threads}
        for name, value in (*least.items(), *(("streams", number) for number in self.streams)):
            if value < 1:
                raise ValueError(f"{name}: too small")
        if any(not 0 < gamma <= MAX_GAMMA for gamma in self.gammas):
            raise ValueError(f"gammas: one is not in 1 to {MAX_GAMMA}")
        if self.weights not in ("auto", "int8"):
            raise ValueError("weights: neither auto nor int8")
        if unknown := [name for name in self.without if name not in SYSTEMS]:
            raise ValueError(f"without: {', '.join(unknown)} is none of {', '.join(SYSTEMS)}")
        names = [Path(path).name for path in self.in_target]
        if len(set(names)) < len(names):
            raise ValueError(f"in-target: got directories of the same name, {', '.join(names)}")
        if any(temperature < 0 for temperature in self.temperatures):
            raise ValueError("temperature: a negative one")
        if self.llama_server and self.gguf is None:
            raise ValueError("LLAMA_SERVER needs --gguf")

    def recorded(self) -> dict[str, Any]:
        """Return the settings for a result file, without the paths of this machine.

        An absolute path is relative to the working directory, or only a name outside of it.
        """
        return {name: _without_machine(value) for name, value in asdict(self).items()}


def _without_machine(value: object) -> object:
    if not isinstance(value, (str, Path)) or not Path(value).is_absolute():
        return str(value) if isinstance(value, Path) else value
    path, here = Path(value), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def encode(tokenizer: Tokenizer, tasks: Iterable[Task]) -> list[tuple[int, ...]]:
    """Return the prompts as token ids: by the chat template, or as plain text for models without one."""
    found = []
    for task in tasks:
        try:
            text = tokenizer.render_chat(task.messages)
        except InvalidArgumentError:
            text = task.text
        found.append(tuple(tokenizer.encode(text)))
    return found


def plain_of(system: str) -> str:
    """Return the plain decoding of the software that a system belongs to."""
    for prefix, plain in (("gammaray-", PLAIN), (LLAMA, LLAMA)):
        if system.startswith(prefix):
            return plain
    return REFERENCE


def references(names: Sequence[str], temperature: float) -> dict[str, str]:
    """Return whose tokens each system must or should reproduce, among systems that are measured.

    Speculation must reproduce plain decoding of the same software; above temperature 0 this holds for
    gammaray alone, whose noise depends on the seed only. At temperature 0 the plain decoding of each program
    is compared with that of transformers.
    """
    found = {}
    for name in names:
        plain = plain_of(name)
        reference = REFERENCE if name == plain else plain
        if reference in names and reference != name and (temperature == 0 or reference == PLAIN):
            found[name] = reference
    return found


def has_changed_tokens(result: dict[str, Any]) -> bool:
    """Return whether speculation in gammaray changed a token."""
    return any(
        count["equal"] != count["compared"]
        for point in result["points"]
        for count in point["equality"]
        if count["reference"] == PLAIN
    )


async def compare(settings: Settings, console: Console) -> dict[str, Any]:
    """Run the comparison and return its result, JSON-ready.

    Raises:
        ClusterError: Something could not be started, the prompts do not fit the model's context, or all loads
            failed; if some of them failed, `failures` says which.
    """
    os.environ["GAMMARAY_THREADS"] = str(settings.threads)  # for the cluster's workers
    tokenizer = Tokenizer(resolve_model(settings.target, "target"))
    tasks = load_tasks(settings.categories, settings.num_prompts)
    prompts = dict(zip(tasks, encode(tokenizer, tasks), strict=True))
    room = tokenizer.max_context - settings.max_tokens - _SPARE
    left_out = [task.id for task, token_ids in prompts.items() if len(token_ids) > room]
    prompts = {task: token_ids for task, token_ids in prompts.items() if len(token_ids) <= room}
    if not prompts:
        raise ClusterError(f"no prompt leaves room for {settings.max_tokens} tokens in the model's context")
    points: list[dict[str, Any]] = []
    failures: list[str] = []
    async with AsyncExitStack() as stack:
        console.print("starting the systems ...")
        context = max(map(len, prompts.values())) + settings.max_tokens + _SPARE
        started = await _start(settings, context, stack)
        for temperature, streams in itertools.product(settings.temperatures, settings.streams):
            systems = started.at(streams, settings.without)
            try:
                samples = await _measure(settings, prompts, systems, temperature, streams, console)
            except (ClusterError, GammarayError, httpx.HTTPError) as error:
                failures.append(f"temperature {temperature:g}, {streams} in flight: {error!r}")
                console.print(failures[-1])
                continue
            except asyncio.CancelledError:  # by a signal: what is measured is kept
                failures.append(f"ended at temperature {temperature:g}, {streams} in flight")
                break
            kept, loops = without_loops(samples)
            if line := loops_line(loops):
                console.print(line)
            tasks_kept = [task for i, task in enumerate(prompts) if i in loops["kept"] or streams > 1]
            compared = equality(samples, references(list(samples), temperature), tokenizer.eos_token_ids)
            for category, part in parts_of(kept, tasks_kept, streams).items():
                point = _point(category, part, temperature, streams, tokenizer.eos_token_ids)
                if category == ALL:
                    point |= {"equality": compared, "loops": loops}
                title = f"temperature {temperature:g}, {streams} in flight, {category}"
                console.print(table(title, point["rows"], point["equality"]))
                points.append(point)
        memory_mb = {name: resident_mb(processes) for name, processes in started.processes.items()}
    if not points:
        raise ClusterError("; ".join(failures))
    return {
        "settings": settings.recorded(),
        "llama_version": llama_version(settings.llama_server) if settings.llama_server else None,
        "prompts": {task.id: len(token_ids) for task, token_ids in prompts.items()},
        "left_out": left_out,
        "workload_fingerprint": fingerprint([" ".join(map(str, ids)) for ids in prompts.values()]),
        "failures": failures,
        "memory_mb": memory_mb,
        "points": points,
    }


@dataclass
class _Started:
    """The running systems.

    Args:
        client: Of gammaray's cluster.
        peers: Systems of transformers, which completes one prompt per call: measured with one in flight only.
        llama: Those of llama.cpp.
        gammas: Those of gammaray's that are fixed, besides 0.
        variants: Options of its other systems, by name.
        in_target: Clients of clusters that draft in the target worker, by name.
        processes: Those of each program.
    """

    client: AsyncClient
    peers: list[System]
    llama: list[System]
    gammas: tuple[int, ...]
    variants: Mapping[str, GenerateOptions]
    in_target: dict[str, AsyncClient]
    processes: dict[str, list[psutil.Process]]

    def at(self, streams: int, without: Collection[str]) -> list[System]:
        """Return the systems to measure with that many completions in flight.

        The traces of the cluster's sessions are read with one only: the calls would delay other completions.
        """
        kind = TracedStack if streams == 1 else Stack
        systems = [*(self.peers if streams == 1 else ()), *self.llama]
        systems += [kind(gamma, self.client) for gamma in (0, *self.gammas)]
        systems += [
            kind("adaptive", self.client, options=how, name=name) for name, how in self.variants.items()
        ]
        for name, client in self.in_target.items():
            systems += [kind(g, client, name=f"gammaray-{g}, in the target: {name}") for g in self.gammas]
            systems.append(kind("adaptive", client, name=f"gammaray-adaptive, in the target: {name}"))
        return [system for system in systems if system.name not in without]


async def _start(settings: Settings, context: int, stack: AsyncExitStack) -> _Started:
    threads = settings.threads
    # A drafter of `gammaray train` shares weights with its target; other programs cannot load it.
    ordinary = settings.draft
    if ordinary and (Path(resolve_model(ordinary, "draft")) / "gammaray.json").exists():
        ordinary = None
    names = [*_PEERS, *(_WITH_DRAFT if ordinary else ())]
    peers: list[System] = []
    if wanted := [name for name in names if name not in settings.without]:  # it holds the models once more
        baselines = await stack.enter_async_context(running_baselines(settings.target, ordinary, threads))
        peers = [Peer(name, baselines) for name in wanted]
    weights, dtype = settings.weights, settings.dtype
    processes: dict[str, list[psutil.Process]] = {}
    before = set(_below())

    def started(name: str) -> None:
        processes[name] = [process for process in _below() if process not in before]
        before.update(processes[name])

    cluster = connected(settings.target, settings.draft, settings.head, weights, dtype=dtype)
    client = await stack.enter_async_context(cluster)
    started("gammaray")
    in_target: dict[str, AsyncClient] = {}
    for head in settings.in_target:
        name = Path(head).name
        cluster = connected(settings.target, None, head, weights, dtype=dtype)
        in_target[name] = await stack.enter_async_context(cluster)
        started(f"gammaray, in the target: {name}")
    llama: list[System] = []
    if settings.llama_server:
        assert settings.gguf is not None
        sizes = {"threads": threads, "slots": max(settings.streams), "context": context}
        for name, options in modes(settings.draft_gguf, threads).items():
            if name not in settings.without:
                server = running_llama(settings.llama_server, settings.gguf, options, **sizes)
                url = await stack.enter_async_context(server)
                llama.append(await stack.enter_async_context(connected_llama(name, url)))
                started(name)
    variants = VARIANTS | (SINGLE if settings.draft and settings.head else {})
    return _Started(client, peers, llama, settings.gammas, variants, in_target, processes)


def _below() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def resident_mb(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """Return the resident memory of these processes by kind."""
    found: dict[str, float] = {}
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            kind = kind_of(process)
            found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
    return found


async def _measure(
    settings: Settings,
    prompts: dict[Task, tuple[int, ...]],
    systems: Sequence[System],
    temperature: float,
    streams: int,
    console: Console,
) -> Samples:
    asks = [
        Ask(
            token_ids,
            settings.max_tokens,
            temperature,
            seed,
            prediction=task.prediction or "",
            ignore_eos=settings.ignore_eos,
        )
        for seed, (task, token_ids) in enumerate(prompts.items())
    ]
    with Progress(console=console, transient=True) as progress:
        total = len(systems) * settings.repetitions * max(len(asks), 2 * streams if streams > 1 else 0)
        bar = progress.add_task(f"temperature {temperature:g}, {streams} in flight", total=total)
        shuffle = random.Random(settings.seed)
        return await measure(
            systems, asks, settings.repetitions, lambda: progress.advance(bar), streams, shuffle
        )


def parts_of(samples: Samples, tasks: Sequence[Task], streams: int) -> dict[str, Samples]:
    """Return the samples of each category and of all; with several streams a turn holds all of them."""
    parts: dict[str, Samples] = {}
    if streams == 1:
        for category in dict.fromkeys(task.category for task in tasks):
            parts[category] = {
                system: [
                    [turn for turn, task in zip(turns, tasks, strict=True) if task.category == category]
                    for turns in repetitions
                ]
                for system, repetitions in samples.items()
            }
    return parts | {ALL: samples}


def _point(
    category: str, samples: Samples, temperature: float, streams: int, eos_token_ids: frozenset[int]
) -> dict[str, Any]:
    return {
        "category": category,
        "temperature": temperature,
        "verification": "coupled",
        "concurrency": streams,
        "rows": [figures(name, samples, plain_of(name)) for name in samples],
        "equality": equality(samples, references(list(samples), temperature), eos_token_ids),
    }
