"""What a verify step on vLLM costs over vLLM's own decode step, in the same process.

    python -m benchmarks.vllm_steps --model build/models/smollm2

Two engines with the same model: gammaray's (held scheduler, gammaray's sampler) and vLLM's own, with its
scheduler and sampler unmodified and without speculation. Each kind of step runs once per turn, in an order
that rotates; ratios are medians over the turns. Times are processor time of the whole process with one
arithmetic thread, which other processes of the machine disturb less than elapsed time. Proposals are tokens
that are rejected: each step emits one token, as vLLM's own does. Needs an environment with vLLM (`make
vllm`).
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.blocks import Verdict
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.scheduling.planning import Limits
from services.scheduling.tasks import SessionSpec, VerifyTask
from services.vllm.engine import EngineOptions, VllmEngine
from services.vllm.scheduler import VllmScheduler

GAMMAS = (0, 1, 4, 8)
SESSIONS = (1, 4, 16)
CONTEXT = 200
CACHE_BYTES = 1 << 30
WRONG_TOKEN = 3
"""Unlikely enough to be rejected; the emitted tokens tell."""

_request_ids = itertools.count()


class Held:
    """Sessions on gammaray's engine."""

    def __init__(self, scheduler: VllmScheduler, count: int, temperature: float) -> None:
        self._scheduler = scheduler
        self._specs = [
            SessionSpec(
                SamplingParams(temperature=temperature, seed=number),
                VerificationMethod.COUPLED,
                CONTEXT,
                (),
            )
            for number in range(count)
        ]
        self._names = [f"{next(_request_ids)}" for _ in range(count)]
        self._tokens = [prompt(number) for number in range(count)]
        self._held = [0] * count
        self.num_accepted = 0
        self.step(0)

    def step(self, gamma: int) -> None:
        """Run one block of each session."""
        proposal = Proposal((WRONG_TOKEN,) * gamma)
        tasks = [
            VerifyTask(
                request_id=number,
                session_id=name,
                epoch=1,
                base_position=len(tokens),
                context_start=held,
                context=tokens[held:],
                spec=None if held else spec,
                deadline=math.inf,
                deliver=lambda task, reply: None,
                proposal=proposal,
                num_top_logprobs=None,
            )
            for number, (name, spec, tokens, held) in enumerate(
                zip(self._names, self._specs, self._tokens, self._held, strict=True)
            )
        ]
        self._scheduler.submit(tasks)
        while not self._scheduler.is_idle:
            for task, reply in self._scheduler.step():
                verdict = reply.outcome
                assert isinstance(verdict, Verdict), verdict
                self._held[task.request_id] = len(self._tokens[task.request_id])
                emitted = [WRONG_TOKEN] * len(verdict.accepted_path)
                self._tokens[task.request_id] += [*emitted, verdict.next_token_id]
                self.num_accepted += len(emitted)

    def end(self) -> None:
        """Release the sessions."""
        self._scheduler.release([(name, 0, True) for name in self._names])  # type: ignore[misc]
        self._scheduler.step()


class Plain:
    """Requests on vLLM's own engine, which decode until they are aborted."""

    def __init__(self, core: Any, count: int, temperature: float) -> None:
        from vllm.sampling_params import SamplingParams as VllmParams
        from vllm.v1.engine import EngineCoreRequest

        self._core, self._names = core, [f"{next(_request_ids)}" for _ in range(count)]
        for number, name in enumerate(self._names):
            # Without a seed: vLLM 0.32 fails on CPUs for a seeded request whose prompt comes in chunks.
            params = VllmParams(temperature=temperature, max_tokens=100_000, ignore_eos=True)
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt(number),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=name,
                data_parallel_rank=None,
            )
            core.add_request(*core.preprocess_add_request(request))
        core.step()
        while any(request.num_output_tokens == 0 for request in core.scheduler.requests.values()):
            core.step()

    def step(self) -> None:
        """Decode one token of each request."""
        self._core.step()

    def end(self) -> None:
        """Abort the requests."""
        self._core.abort_requests(self._names)
        self._core.step()


def plain_core(model: Path, dtype: str) -> Any:
    """Return vLLM's engine with its own scheduler and worker, limits as ours.

    Asynchronous scheduling is off: one step after another is measured, in one process.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = EngineArgs(
        model=str(model),
        dtype=dtype,
        max_num_seqs=256,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        async_scheduling=False,
        kv_cache_memory_bytes=CACHE_BYTES,
        disable_log_stats=True,
    ).create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def prompt(number: int) -> list[int]:
    """Return a prompt that no other session has."""
    return [1000 + (number * 7919 + index * 31) % 30000 for index in range(CONTEXT)]


def seconds(step: Callable[[], None]) -> tuple[float, float]:
    """Return the processor time and the elapsed time of a step."""
    began, elapsed = time.process_time(), time.perf_counter()
    step()
    return time.process_time() - began, time.perf_counter() - elapsed


def measure(
    scheduler: VllmScheduler, core: Any, counts: Sequence[int], temperature: float, turns: int
) -> list[dict[str, Any]]:
    """Return the times of steps by number of sessions and gamma."""
    points = []
    for count in counts:
        held, plain = Held(scheduler, count, temperature), Plain(core, count, temperature)
        times: dict[int | None, list[tuple[float, float]]] = {gamma: [] for gamma in (None, *GAMMAS)}
        for gamma in GAMMAS:
            held.step(gamma)
        steps: dict[int | None, Callable[[], None]] = {None: plain.step}
        steps |= {gamma: partial(held.step, gamma) for gamma in GAMMAS}
        kinds = list(steps)
        for turn in range(turns):
            for kind in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                times[kind].append(seconds(steps[kind]))
        for gamma, taken in times.items():
            ratios = [cpu / own for (cpu, _), (own, _) in zip(taken, times[None], strict=True)]
            points.append(
                {
                    "sessions": count,
                    "temperature": temperature,
                    "gamma": gamma,
                    "cpu_ms": statistics.median(cpu for cpu, _ in taken) * 1e3,
                    "least_cpu_ms": min(cpu for cpu, _ in taken) * 1e3,
                    "elapsed_ms": statistics.median(elapsed for _, elapsed in taken) * 1e3,
                    "over_plain": statistics.median(ratios),
                }
            )
        print(f"{count} sessions, temperature {temperature}: {held.num_accepted} tokens accepted", flush=True)
        held.end()
        plain.end()
    return points


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2"))
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--sessions", type=int, nargs="+", default=SESSIONS)
    parser.add_argument("--out", type=Path, help="result file; default: results/vllm-steps-<date>.json")
    options = parser.parse_args()
    engine_options = EngineOptions(str(options.model), cache_budget_bytes=CACHE_BYTES)
    scheduler = VllmScheduler(VllmEngine(engine_options), Limits(1024, 256))
    core = plain_core(options.model, scheduler.engine.dtype)
    points = [
        point
        for temperature in (0.0, 1.0)
        for point in measure(scheduler, core, options.sessions, temperature, options.turns)
    ]
    kernel = scheduler.engine.kernel
    core.shutdown()
    scheduler.close()
    table = plain_table(
        f"{kernel}: steps after {CONTEXT} tokens",
        ("sessions", "temperature", "step", "CPU (ms)", "over vLLM's own"),
    )
    for point in points:
        table.add_row(
            str(point["sessions"]),
            f"{point['temperature']:g}",
            "vLLM's own" if point["gamma"] is None else f"gamma {point['gamma']}",
            f"{point['cpu_ms']:.1f}",
            f"{point['over_plain']:.2f}",
        )
    Console().print(table)
    result = {
        "model": options.model.name,
        "kernel": kernel,
        "context": CONTEXT,
        "turns": options.turns,
        "points": points,
    }
    print(f"written to {write_result('vllm-steps', result, options.out)}")


if __name__ == "__main__":
    main()
