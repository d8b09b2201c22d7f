"""A deterministic model of 256 tokens, on the product's engine, and an engine's thread on the simulated loop.

The logits are a function of all tokens before, so that one wrong token, or one that is missing, changes
everything after it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from gammaray.errors import InternalError
from services.engine.core.batch import Batch, Runner, Segment
from services.engine.core.kv_cache import CacheShape
from services.engine.engine import Engine
from services.engine.sampling.noise import Noise
from services.own.draft_scheduler import DraftScheduler
from services.own.target_scheduler import TargetScheduler
from services.scheduling.planning import Limits
from services.scheduling.scheduler import Scheduler
from services.scheduling.tasks import Release, Reply, Task
from services.speculation.outcomes import AHEAD_ROWS
from tests.simulation.loop import SimulatedLoop

VOCAB_SIZE, MAX_CONTEXT = 256, 256
LIMITS = Limits(max_batch_tokens=64, prefill_chunk=32)
NUM_ROWS = 512

_rng = torch.Generator().manual_seed(1)
_TARGET = 3.0 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=_rng)
_DRAFT = _TARGET + 0.6 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=_rng)


def _row(tokens: tuple[int, ...]) -> int:
    """Return the row of the table that all tokens before select."""
    return hash(tokens) % NUM_ROWS


class TinyRunner(Runner):
    """Returns the row of a table [NUM_ROWS, VOCAB_SIZE] that the tokens before select."""

    def __init__(self, table: Tensor) -> None:
        self._table = table.numpy()  # whose rows are taken in half of torch's time

    def forward(self, batch: Batch) -> Tensor:
        rows = [row for segment in batch.segments for row in self._rows(batch, segment)]
        if batch.logit_rows is not None:
            rows = [rows[row] for row in batch.logit_rows]
        return torch.from_numpy(self._table[rows])

    @staticmethod
    def _rows(batch: Batch, segment: Segment) -> list[int]:
        parents, cache = segment.parents or (), segment.cache
        tokens = batch.token_ids[segment.row : segment.row + segment.count]
        num_chain = segment.count - len(parents)
        chain = (*cache.tokens, *tokens[:num_chain])
        paths: list[tuple[int, ...]] = []
        drafted = zip((*cache.tree_parents, *parents), (*cache.tree_tokens, *tokens[num_chain:]), strict=True)
        for parent, token_id in drafted:
            paths.append((*paths[parent], token_id) if parent >= 0 else (*chain, token_id))
        ends = range(len(cache.tokens) + 1, len(chain) + 1)
        return [*(_row(chain[:end]) for end in ends), *map(_row, paths[len(cache.tree_tokens) :])]


def _engine(table: Tensor, cache_bytes: int) -> Engine:
    shape = CacheShape(1, 1, 1, torch.float32, torch.device("cpu"))
    sizes = {"vocab_size": VOCAB_SIZE, "max_context": MAX_CONTEXT}
    return Engine(TinyRunner(table), shape, cache_bytes, model_name="tiny", **sizes)


def target_scheduler(cache_bytes: int) -> TargetScheduler:
    return TargetScheduler(_engine(_TARGET, cache_bytes), LIMITS)


def draft_scheduler(cache_bytes: int, *, ahead: bool) -> DraftScheduler:
    return DraftScheduler(_engine(_DRAFT, cache_bytes), LIMITS, ahead_rows=AHEAD_ROWS if ahead else 0)


@cache
def plain_tokens(prompt: tuple[int, ...], temperature: float, seed: int, count: int) -> tuple[int, ...]:
    """Return what the target alone generates, computed without the engine, its caches and its scheduler."""
    noise = Noise(seed, 0, VOCAB_SIZE)
    tokens = prompt
    for _ in range(count):
        scores = _TARGET[_row(tokens)]
        if temperature > 0:
            scores = (scores / temperature).log_softmax(-1) + noise.gumbel(len(tokens), 1)[0]
        tokens += (int(scores.argmax()),)
    return tokens[len(prompt) :]


T = TypeVar("T")


class SteppedEngine:
    """Takes the place of `EngineThread`: the scheduler's steps are callbacks of the loop.

    As there, commands wait for the end of a step, and its answers are delivered after it.

    Args:
        loop: The simulation's.
        scheduler: The worker's.
        step_s: Least and most seconds of a step.

    Attributes:
        fails_next: Whether the next step fails, as for want of memory.
    """

    def __init__(self, loop: SimulatedLoop, scheduler: Scheduler[Any], step_s: tuple[float, float]) -> None:
        self._loop, self.scheduler, self.step_s = loop, scheduler, step_s
        self.fails_next = False
        self._inbox: list[Callable[[Scheduler[Any]], None]] = []
        self._is_busy = False

    def _put(self, command: Callable[[Scheduler[Any]], None]) -> None:
        self._inbox.append(command)
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._run)

    def _run(self) -> None:
        commands, self._inbox = self._inbox, []
        for command in commands:
            command(self.scheduler)
        if not self.scheduler.has_work:
            self._is_busy = False
            return
        try:
            if self.fails_next:
                self.fails_next = False
                raise MemoryError("a planted failure")
            replies = self.scheduler.step()
        except Exception as error:
            if not isinstance(error, MemoryError):
                self._loop.errors.append(f"a step failed: {error!r}")
            self.scheduler.fail_all(InternalError(f"a step failed: {error!r}"))
            replies = []
        self._loop.call_later(self._loop.rng.uniform(*self.step_s), self._end_step, replies)

    def _end_step(self, replies: list[tuple[Task, Reply]]) -> None:
        for task, reply in replies:
            task.deliver(task, reply)
        self._loop.call_soon(self._run)

    def submit(self, tasks: Sequence[Task]) -> None:
        self.scheduler.queue.preempt(tasks)
        self._put(lambda scheduler: scheduler.submit(tasks))

    def release(self, endings: Sequence[Release]) -> None:
        self._put(lambda scheduler: scheduler.release(endings))

    async def call(self, function: Callable[[Scheduler[Any]], T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()

        def command(scheduler: Scheduler[Any]) -> None:
            if not future.done():
                future.set_result(function(scheduler))

        self._put(command)
        return await future

    def look(self, function: Callable[[Scheduler[Any]], T]) -> T:
        return function(self.scheduler)
