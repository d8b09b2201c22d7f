"""Runs schedules by the hundred, and shortens the history of one that fails."""

import functools
import gc
import hashlib
import logging
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import redis.utils
import torch

from tests.simulation.faults import Fault, draw_faults
from tests.simulation.redis_link import RealRedis, real_redis
from tests.simulation.schedule import run_schedule


@dataclass
class Report:
    num_schedules: int = 0
    failures: dict[int, str] = field(default_factory=dict)  # what did not hold, by seed
    injected: Counter[str] = field(default_factory=Counter)  # number of faults by kind
    steps: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    real_s: float = 0.0
    digest: str = ""  # of what all clients received, and when

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.injected.most_common())
        rate, cpu_rate = (self.num_schedules / max(seconds, 1e-9) for seconds in (self.real_s, self.cpu_s))
        return (
            f"{self.num_schedules} schedules, {self.steps} callbacks, {self.simulated_s:.0f} simulated s, "
            f"digest {self.digest}; {rate:.1f} schedules/s, {cpu_rate:.1f} per second of processor time\n"
            f"{self.injected.total()} faults: {kinds}\n{len(self.failures)} failed"
        )


@contextmanager
def laboratory() -> Iterator[RealRedis]:
    """Prepare this process for simulations: one thread, no log, and a Redis.

    Redis shares the core: it runs only while the simulation waits for it, and to wake another core takes four
    times as long as a command.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {psutil.Process().cpu_num()})  # where the scheduler has put it, beside others
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    # Coroutines that end with their simulation.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited")
    # redis-py reads the metadata of its package for each connection.
    redis.utils.get_lib_version = functools.cache(redis.utils.get_lib_version)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # of generators that end with theirs
    with real_redis() as real:
        run_schedule(0, real, [])  # imports what is imported on first use
        gc.collect()
        gc.freeze()
        try:
            yield real
        finally:
            gc.unfreeze()
            gc.collect()
            os.sched_setaffinity(0, cores)
            sys.unraisablehook = hook
            logging.disable(logging.NOTSET)


def run_seeds(seeds: Iterable[int], real: RealRedis, *, ends_at_failure: bool = False) -> Report:
    """Run a schedule per seed; with `ends_at_failure` up to the first that fails."""
    report = Report()
    began, began_cpu = time.perf_counter(), time.process_time()
    for seed in seeds:
        outcome = run_schedule(seed, real)
        report.num_schedules += 1
        report.injected += outcome.injected
        report.steps += outcome.steps
        report.simulated_s += outcome.simulated_s
        report.digest = hashlib.sha256(f"{report.digest} {outcome.digest}".encode()).hexdigest()[:12]
        if outcome.failure:
            report.failures[seed] = outcome.failure
            if ends_at_failure:
                break
    report.real_s, report.cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    return report


def shortest(seed: int, real: RealRedis) -> tuple[list[Fault], str]:
    """Return a history of the failing seed from which no fault can be left out, and how it fails."""
    faults = draw_faults(random.Random(seed))
    failure = run_schedule(seed, real, faults).failure
    is_shorter = True
    while is_shorter:
        is_shorter = False
        for index in range(len(faults)):
            fewer = faults[:index] + faults[index + 1 :]
            if found := run_schedule(seed, real, fewer).failure:
                faults, failure, is_shorter = fewer, found, True
                break
    return faults, failure
