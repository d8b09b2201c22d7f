"""What the phases share: the plan, the engines, their sessions and a clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.loop import Session, new_sessions, release
from benchmarks.gpu.pair import Pair
from services.engine.graph_engine import GraphEngine

__all__ = ["Context", "Expired", "Plan", "ReadSessions", "replay_time", "time_of"]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        batches: Sessions at a time.
        decode_batches: Likewise, of plain decoding.
        contexts: Cached tokens of one session.
        draft_layers: Depths of the drafts.
        alphas: Coupled alphas to calibrate for.
        verify_sizes: Tokens per session of a target step.
        num_prompt: Tokens of a prompt.
        num_steps: Plain decoding steps per repetition.
        num_cycles: Cycles per repetition.
        repetitions: Of each loop, in turn; medians are reported.
        copy_bytes: Size of the copied buffer.
        sample: (sessions, tokens) that a calibration step looks at.
    """

    batches: tuple[int, ...]
    decode_batches: tuple[int, ...]
    contexts: tuple[int, ...]
    draft_layers: tuple[int, ...]
    alphas: tuple[float, ...]
    verify_sizes: tuple[int, ...]
    num_prompt: int
    num_steps: int
    num_cycles: int
    repetitions: int
    copy_bytes: int
    sample: tuple[int, int]


@dataclass
class Context:
    """What the phases share: engines, and costs that later phases need."""

    plan: Plan
    pair: Pair
    target: GraphEngine
    drafts: dict[int, GraphEngine]
    bytes_per_s: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where it all runs."""
        return self.pair.model.device


Expired = Callable[[], bool]


class ReadSessions:
    """New sessions that all engines have read, freed at the end."""

    def __init__(self, engines: Sequence[GraphEngine], batch: int, num_prompt: int) -> None:
        self._engines, self._batch, self._num_prompt = engines, batch, num_prompt

    def __enter__(self) -> list[Session]:
        self._sessions = new_sessions(self._engines, self._batch, self._num_prompt, temperature=1.0)
        return self._sessions

    def __exit__(self, *_: object) -> None:
        release(self._engines, self._sessions)


def replay_time(engine: GraphEngine, repetitions: int = 5, replays: int = 4) -> float:
    """Median seconds of the engine's last work alone."""
    capture = engine.runner.last
    assert capture is not None
    with torch.inference_mode():
        capture.run()
        return statistics.median(time_of(engine.device, capture.run, replays) for _ in range(repetitions))


def time_of(device: torch.device, work: Callable[[], object], replays: int) -> float:
    """Seconds per call, on the device's own clock where it has one."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(replays):
            work()
        return (time.perf_counter() - began) / replays
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(replays):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / replays
