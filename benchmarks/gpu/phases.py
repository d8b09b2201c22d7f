"""What single steps cost, one function per phase; each ends early when its time is up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.context import Context, Expired, ReadSessions, replay_time, time_of
from benchmarks.gpu.loop import decode, propose
from benchmarks.gpu.pair import random_tokens
from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.cuda.runner import Capture
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.graph_engine import GraphEngine

__all__ = ["bandwidth", "contexts", "decoding", "draft_costs", "products", "verify_costs"]

_CHUNK = 512
"""Tokens of a prompt in one step."""


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes read and written per second by a copy within device memory; the best of ten."""
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = [time_of(device, lambda: target.copy_(source), 2) for _ in range(5)]
    return 2 * num_bytes / min(times)


def products(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Weights read per second by kind of product: our kernels against the library's; the faster is taken.

    The library is taken for all numbers of rows when it is faster at one row over the whole model.
    """
    model, kernels = context.pair.model, context.target.runner.kernels
    library = TorchKernels(model)
    kinds = {
        "qkv": [layer.qkv for layer in model.layers],
        "out": [layer.out for layer in model.layers],
        "gate_up": [layer.gate_up for layer in model.layers],
        "down": [layer.down for layer in model.layers],
        "head": [model.head] * 4,
    }
    totals = {"ours_s": 0.0, "library_s": 0.0}
    for rows in (1, 8, 32):
        for kind, matrices in kinds.items():
            if expired():
                return
            times = {
                "ours_s": _product_time(kernels, matrices, rows),
                "library_s": _product_time(library, matrices, rows),
            }
            if rows == 1:
                totals = {name: totals[name] + seconds for name, seconds in times.items()}
            num_bytes = sum(matrix.numel() * matrix.element_size() for matrix in matrices)
            yield {
                "kind": kind,
                "rows": rows,
                "ours_gb_per_s": num_bytes / times["ours_s"] / 1e9,
                "library_gb_per_s": num_bytes / times["library_s"] / 1e9,
            }
    if totals["library_s"] < totals["ours_s"]:
        for engine in (context.target, *context.drafts.values()):
            engine.runner.kernels.max_rows = 0


def _product_time(kernels: TorchKernels, matrices: Sequence[Tensor], rows: int) -> float:
    """Seconds for one product with each matrix; captured where that is possible, as in a step."""
    matrix = matrices[0]
    x = torch.randn(rows, matrix.shape[1], device=matrix.device).to(matrix.dtype)
    out = torch.zeros(rows, matrix.shape[0], dtype=matrix.dtype, device=matrix.device)

    def work() -> None:
        for weight in matrices:
            kernels.linear(x, weight, None, out)

    capture = Capture(work, capturable=matrix.is_cuda, pool=None)
    with torch.inference_mode():
        capture.run()
        return statistics.median(time_of(matrix.device, capture.run, 3) for _ in range(3))


def decoding(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Plain decoding: through the loop, and the device's share of it; against the bandwidth bound."""
    plan, target = context.plan, context.target
    for batch in plan.decode_batches:
        if expired():
            return
        with ReadSessions([target], batch, plan.num_prompt) as sessions:
            decode(target, sessions, 4)
            device_s = replay_time(target)
            trace = decode(target, sessions, plan.num_steps)
            context_tokens = sum(len(session.text) for session in sessions)
        bound_s = (context.pair.model.step_bytes + context_tokens * _slot_bytes(target)) / context.bytes_per_s
        yield {
            "batch": batch,
            "tokens_per_s": trace.tokens_per_s,
            "step_ms": 1e3 * trace.seconds / trace.cycles,
            "device_ms": 1e3 * device_s,
            "bound_ms": 1e3 * bound_s,
            "share_of_bound": bound_s * trace.cycles / trace.seconds,
            "device_share_of_bound": bound_s / device_s,
        }


def contexts(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """One session by its cached tokens: reading the prompt, plain decoding, and a step that verifies four."""
    target = context.target
    name, draw = "long", GumbelDraw(7, temperature=1.0)
    for length in context.plan.contexts:
        if expired():
            return
        text = random_tokens(length + 5, 3, target.vocab_size)
        seconds = 0.0
        for _ in range(2):  # the first time warms up
            target.release(name)
            began = time.perf_counter()
            for start in range(0, length, _CHUNK):
                target.step([SequenceInput(name, start, text[start : min(length, start + _CHUNK)], 0)])
            target.choose([SequenceInput(name, length, text[length : length + 1], 1)], [draw])
            seconds = time.perf_counter() - began
        times = {}
        for size in (1, 5):
            target.choose([SequenceInput(name, length, text[length : length + size], size)], [draw])
            times[size] = replay_time(target)
        target.release(name)
        bound_s = (context.pair.model.step_bytes + length * _slot_bytes(target)) / context.bytes_per_s
        yield {
            "context": length,
            "prompt_tokens_per_s": length / seconds,
            "device_ms": 1e3 * times[1],
            "bound_ms": 1e3 * bound_s,
            "share_of_bound": bound_s / times[1],
            "verify_4_ratio": times[5] / times[1],
        }


def verify_costs(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Device time of a target step by tokens per session, and its ratio to one token."""
    plan, target = context.plan, context.target
    for batch in plan.batches:
        with ReadSessions([target], batch, plan.num_prompt) as sessions:
            one_s = 0.0
            for size in plan.verify_sizes:
                if expired():
                    return
                gumbel_draws = [session.gumbel_draw for session in sessions]
                target.choose(
                    [SequenceInput(s.name, len(s.text) - 1, s.text[:size], size) for s in sessions],
                    gumbel_draws,
                )
                device_s = replay_time(target)
                one_s = one_s or device_s
                yield {
                    "batch": batch,
                    "tokens": size,
                    "device_ms": 1e3 * device_s,
                    "ratio": device_s / one_s,
                }


def draft_costs(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Time of whole proposals through the host, of one more token in them, and of a step on the device."""
    plan = context.plan
    for num_layers, draft in context.drafts.items():
        for batch in plan.batches:
            with ReadSessions([draft], batch, plan.num_prompt) as sessions:
                gumbel_draws = [session.gumbel_draw for session in sessions]
                times = {}
                for gamma in (2, 8):
                    if expired():
                        return
                    work = partial(propose, draft, sessions, gumbel_draws, gamma)
                    work()
                    times[gamma] = statistics.median(_seconds(work) for _ in range(5))
                device_s = replay_time(draft)
            step_s = (times[8] - times[2]) / 6
            bound_s = draft.runner.model.step_bytes / context.bytes_per_s
            yield {
                **context.pair.describe(num_layers),
                "batch": batch,
                "gamma_2_ms": 1e3 * times[2],
                "gamma_8_ms": 1e3 * times[8],
                "step_ms": 1e3 * step_s,
                "device_ms": 1e3 * device_s,
                "share_of_bound": bound_s / step_s if step_s > 0 else None,
            }


def _seconds(work: Callable[[], object]) -> float:
    """Wall time of work that waits for the device at its end."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _slot_bytes(engine: GraphEngine) -> int:
    shape = engine.runner.model.shape
    itemsize = engine.runner.model.head.element_size()
    return 2 * shape.num_kv_heads * shape.head_dim * itemsize * engine.num_layers
