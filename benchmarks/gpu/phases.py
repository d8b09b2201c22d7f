"""What is measured, one function per phase; each stops early when its time is up and says so."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.loop import Session, decode, new_sessions, release, speculate
from benchmarks.gpu.pair import Pair
from gammaray.theory import expected_tokens
from services.engine.batch import Feed
from services.engine.graphs import Capture
from services.engine.graphs_draft import TreeShape
from services.engine.graphs_engine import GraphEngine
from services.engine.graphs_torch import TorchKernels

__all__ = ["Context", "Plan", "bandwidth", "decoding", "draft_costs", "products", "speedups", "verify_costs"]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        batches: Sessions at a time.
        draft_layers: Depths of the drafts.
        alphas: Coupled alphas to calibrate for.
        verify_sizes: Tokens per session of a target step.
        num_prompt: Tokens of a prompt.
        num_steps: Plain decoding steps per repetition.
        num_cycles: Cycles per repetition.
        repetitions: Of each loop, in turn; medians are reported.
        trees: (width, depth) tried for one session.
        copy_bytes: Size of the copied buffer.
        sample: (sessions, tokens) that a calibration step looks at.
    """

    batches: tuple[int, ...]
    draft_layers: tuple[int, ...]
    alphas: tuple[float, ...]
    verify_sizes: tuple[int, ...]
    num_prompt: int
    num_steps: int
    num_cycles: int
    repetitions: int
    trees: tuple[tuple[int, int], ...]
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


def bandwidth(device: torch.device, num_bytes: int) -> float:
    """Return bytes read and written per second by a copy within device memory; the best of ten."""
    source = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = [_time(device, lambda: target.copy_(source), 2) for _ in range(5)]
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
        return statistics.median(_time(matrix.device, capture.run, 3) for _ in range(3))


def decoding(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Plain decoding: through the loop, and the device's share of it; against the bandwidth bound."""
    plan, target = context.plan, context.target
    for batch in plan.batches:
        if expired():
            return
        with _Sessions([target], batch, plan.num_prompt) as sessions:
            decode(target, sessions, 4)
            device_s = _replay(target)
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


def verify_costs(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Device time of a target step by tokens per session, and its ratio to one token."""
    plan, target = context.plan, context.target
    for batch in plan.batches:
        with _Sessions([target], batch, plan.num_prompt) as sessions:
            one_s = 0.0
            for size in plan.verify_sizes:
                if expired():
                    return
                races = [session.race for session in sessions]
                target.choose([Feed(s.name, len(s.text) - 1, s.text[:size], size) for s in sessions], races)
                device_s = _replay(target)
                one_s = one_s or device_s
                yield {
                    "batch": batch,
                    "tokens": size,
                    "device_ms": 1e3 * device_s,
                    "ratio": device_s / one_s,
                }


def draft_costs(context: Context, expired: Expired) -> Iterator[dict[str, Any]]:
    """Device time of whole proposals in one graph, and of one more step in it."""
    plan = context.plan
    for num_layers, draft in context.drafts.items():
        for batch in plan.batches:
            with _Sessions([draft], batch, plan.num_prompt) as sessions:
                times = {}
                for gamma in (2, 8):
                    if expired():
                        return
                    races = [session.race for session in sessions]
                    draft.draft_chains(
                        [Feed(s.name, len(s.text) - 2, s.text[-2:], 1) for s in sessions], races, gamma
                    )
                    times[gamma] = _replay(draft)
            step_s = (times[8] - times[2]) / 6
            bound_s = draft.runner.model.step_bytes / context.bytes_per_s
            yield {
                **context.pair.describe(num_layers),
                "batch": batch,
                "gamma_2_ms": 1e3 * times[2],
                "gamma_8_ms": 1e3 * times[8],
                "step_ms": 1e3 * step_s,
                "share_of_bound": bound_s / step_s if step_s > 0 else None,
            }


def speedups(
    context: Context, costs: dict[str, list[dict[str, Any]]], expired: Expired
) -> Iterator[dict[str, Any]]:
    """Chains and trees against plain decoding at each alpha: in turn, ratios within a repetition."""
    plan, sample = context.plan, context.plan.sample
    for num_layers, draft in context.drafts.items():
        for alpha in plan.alphas:
            eps, found = context.pair.calibrate(
                context.target,
                draft,
                num_layers,
                alpha,
                num_sessions=sample[0],
                num_tokens=sample[1],
                expired=expired,
            )
            header = {"layers": num_layers, "alpha_wanted": alpha, "eps": eps, "agreement": asdict(found)}
            for batch in plan.batches:
                if expired():
                    return
                gamma = best_gamma(found.coupled, num_layers, batch, costs)
                shapes: list[int | TreeShape] = [gamma]
                if batch == 1:
                    shapes += [TreeShape(width, depth) for width, depth in plan.trees]
                for shape in shapes:
                    if expired():
                        return
                    yield {**header, "batch": batch, **_compare(context, draft, batch, shape)}


def best_gamma(alpha: float, num_layers: int, batch: int, costs: dict[str, list[dict[str, Any]]]) -> int:
    """The gamma with most tokens per time by the measured costs; 4 where they are missing."""
    steps = [row for row in costs.get("draft", ()) if (row["layers"], row["batch"]) == (num_layers, batch)]
    verify = [row for row in costs.get("verify", ()) if row["batch"] == batch]
    if not steps or len(verify) < 2:
        return 4
    draft_ms = max(0.0, steps[0]["step_ms"])

    def rate(gamma: int) -> float:
        return expected_tokens(alpha, gamma) / (draft_ms * gamma + _verify_ms(verify, gamma + 1))

    return max(range(1, max(row["tokens"] for row in verify)), key=rate)


def _verify_ms(verify: Sequence[dict[str, Any]], tokens: int) -> float:
    """The cost of the next size that was measured."""
    return min(row["device_ms"] for row in verify if row["tokens"] >= tokens)


def _compare(context: Context, draft: GraphEngine, batch: int, shape: int | TreeShape) -> dict[str, Any]:
    plan, target = context.plan, context.target
    ratios, traces, same = [], [], 0
    for repetition in range(plan.repetitions + 1):
        with _Sessions([target], batch, plan.num_prompt) as plain:
            baseline = decode(target, plain, plan.num_steps)
        with _Sessions([target, draft], batch, plan.num_prompt) as ours:
            trace = speculate(target, draft, ours, plan.num_cycles, shape)
        if repetition:  # The first one captures.
            ratios.append(trace.tokens_per_s / baseline.tokens_per_s)
            traces.append(trace)
            same = sum(_agree(one, other) for one, other in zip(plain, ours, strict=True))
    last = traces[-1]
    return {
        "shape": f"{shape.width}x{shape.depth}" if isinstance(shape, TreeShape) else shape,
        "kind": "tree" if isinstance(shape, TreeShape) else "chain",
        "speedup": statistics.median(ratios),
        "speedups": ratios,
        "tokens_per_s": statistics.median(trace.tokens_per_s for trace in traces),
        "tokens_per_cycle": last.emitted / last.cycles / batch,
        "alpha": last.accepted / max(1, last.tested),
        "draft_ms": 1e3 * last.draft_seconds / last.cycles,
        "target_ms": 1e3 * last.target_seconds / last.cycles,
        "host_ms": 1e3 * (last.seconds - last.draft_seconds - last.target_seconds) / last.cycles,
        "same_tokens": f"{same} of {batch}",
    }


def _agree(one: Session, other: Session) -> bool:
    length = min(len(one.tokens), len(other.tokens))
    return one.tokens[:length] == other.tokens[:length]


class _Sessions:
    """New sessions that all engines have read, freed at the end."""

    def __init__(self, engines: Sequence[GraphEngine], batch: int, num_prompt: int) -> None:
        self._engines, self._batch, self._num_prompt = engines, batch, num_prompt

    def __enter__(self) -> list[Session]:
        self._sessions = new_sessions(self._engines, self._batch, self._num_prompt, temperature=1.0)
        return self._sessions

    def __exit__(self, *_: object) -> None:
        release(self._engines, self._sessions)


def _slot_bytes(engine: GraphEngine) -> int:
    shape = engine.runner.model.shape
    itemsize = engine.runner.model.head.element_size()
    return 2 * shape.num_kv_heads * shape.head_dim * itemsize * engine.num_layers


def _replay(engine: GraphEngine, repetitions: int = 5, replays: int = 4) -> float:
    """Median seconds of the engine's last work alone."""
    capture = engine.runner.last
    assert capture is not None
    with torch.inference_mode():
        capture.run()
        return statistics.median(_time(engine.device, capture.run, replays) for _ in range(repetitions))


def _time(device: torch.device, work: Callable[[], object], replays: int) -> float:
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
