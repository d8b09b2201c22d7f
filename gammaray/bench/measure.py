"""Interleaved measurement: every system completes a prompt before the next prompt starts.

Clock speed and the load of other programs vary over time, so systems are compared within a repetition only: a
ratio is computed per repetition (sum of tokens / sum of seconds over its turns), and its median is reported.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gammaray.bench.systems import Ask, Sample, System

PLAIN = "gammaray-0"
"""gammaray's own plain decoding, through the whole stack."""

_WARM_UP_TOKENS = 16
_MIN_WAVES = 2
"""Completions per session in flight: with one each, the slowest completion would determine the result."""


@dataclass(frozen=True)
class Turn:
    """The completions of one system's turn, and the wall-clock seconds of the turn."""

    samples: tuple[Sample, ...]
    seconds: float


Samples = dict[str, list[list[Turn]]]
"""By system, repetition and turn."""


def median_of(values: Sequence[float]) -> dict[str, Any]:
    """Return the median of one value per repetition, and the values; JSON-ready."""
    return {"median": statistics.median(values), "values": tuple(values)}


async def measure(
    systems: Sequence[System],
    asks: Sequence[Ask],
    repetitions: int,
    advance: Callable[[], None],
    concurrency: int = 1,
    shuffle: random.Random | None = None,
) -> Samples:
    """Measure all systems, interleaved, and return their samples; `loads` divides `asks` into turns.

    Each system first completes one short prompt unmeasured. The order of the systems rotates, so that none is
    always the first, or `shuffle` draws it for each turn. `advance` is called after each completion.
    """
    for system in systems:
        await system.sample(replace(asks[0], max_tokens=min(_WARM_UP_TOKENS, asks[0].max_tokens)))
    turns = loads(asks, concurrency)
    samples: Samples = {system.name: [[] for _ in range(repetitions)] for system in systems}
    for repetition in range(repetitions):
        for i, load in enumerate(turns):
            first = (repetition * len(turns) + i) % len(systems)
            order = [*systems[first:], *systems[:first]]
            if shuffle is not None:
                shuffle.shuffle(order)
            for system in order:
                samples[system.name][repetition].append(await _turn(system, load, concurrency, advance))
    return samples


def loads(asks: Sequence[Ask], concurrency: int) -> list[list[Ask]]:
    """Return the load of each turn: one prompt of `asks`, or all of them at `concurrency` above 1.

    In the latter case they are repeated with other seeds until each session in flight has two.
    """
    if concurrency == 1:
        return [[ask] for ask in asks]
    count = max(len(asks), _MIN_WAVES * concurrency)
    return [[replace(asks[i % len(asks)], seed=i) for i in range(count)]]


async def _turn(system: System, load: Sequence[Ask], concurrency: int, advance: Callable[[], None]) -> Turn:
    """Run the completions of `load`, at most `concurrency` at a time; the next starts when one ends."""
    samples: list[Sample | None] = [None] * len(load)
    waiting = iter(enumerate(load))

    async def session() -> None:
        for i, ask in waiting:
            samples[i] = await system.sample(ask)
            advance()

    started = time.perf_counter()
    sessions = [asyncio.ensure_future(session()) for _ in range(min(concurrency, len(load)))]
    try:
        await asyncio.gather(*sessions)
    finally:
        for running in sessions:
            running.cancel()
    seconds = time.perf_counter() - started
    done = tuple(sample for sample in samples if sample is not None)
    # A single completion reports its own time: the time measured here includes the pipe of peers.
    return Turn(done, done[0].seconds if len(done) == 1 else seconds)


def speeds(repetitions: Sequence[Sequence[Turn]]) -> list[float]:
    """Return tokens per second, one per repetition."""
    return [
        sum(len(sample.token_ids) for turn in turns for sample in turn.samples)
        / sum(turn.seconds for turn in turns)
        for turns in repetitions
    ]


def differences(samples: Samples, references: Mapping[str, str]) -> dict[str, Any]:
    """Compare the tokens of systems with those of their reference system, prompt by prompt.

    Returns how many completions are equal, and for the first ten others system, repetition, prompt and the
    index of the first different token.
    """
    compared, different = 0, []
    for system, reference in references.items():
        for repetition, (ours, theirs) in enumerate(zip(samples[system], samples[reference], strict=True)):
            for prompt, (our, their) in enumerate(zip(_flat(ours), _flat(theirs), strict=True)):
                compared += 1
                if our.token_ids != their.token_ids:
                    at = first_difference(our.token_ids, their.token_ids)
                    different.append(
                        {"system": system, "repetition": repetition, "prompt": prompt, "token": at}
                    )
    return {"compared": compared, "equal": compared - len(different), "different": different[:10]}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first index at which two sequences differ, be it the shorter's end; None when equal."""
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return None if len(left) == len(right) else min(len(left), len(right))


def _flat(turns: Sequence[Turn]) -> list[Sample]:
    return [sample for turn in turns for sample in turn.samples]
