"""Speculation against plain decoding, at calibrated alphas."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.context import Context, Expired, ReadSessions
from benchmarks.gpu.loop import Session, decode, speculate
from gammaray.maths.theory import expected_tokens
from services.engine.graph_engine import GraphEngine

__all__ = ["best_gamma", "speedups"]


def speedups(
    context: Context, costs: dict[str, list[dict[str, Any]]], expired: Expired
) -> Iterator[dict[str, Any]]:
    """Speculation against plain decoding at each alpha: in turn, ratios within a repetition."""
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
                yield {**header, "batch": batch, **_compare(context, draft, batch, gamma)}


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


def _compare(context: Context, draft: GraphEngine, batch: int, gamma: int) -> dict[str, Any]:
    plan, target = context.plan, context.target
    ratios, traces, same = [], [], 0
    for repetition in range(plan.repetitions + 1):
        with ReadSessions([target], batch, plan.num_prompt) as plain:
            baseline = decode(target, plain, plan.num_steps)
        with ReadSessions([target, draft], batch, plan.num_prompt) as ours:
            trace = speculate(target, draft, ours, plan.num_cycles, gamma)
        if repetition:  # The first one captures.
            ratios.append(trace.tokens_per_s / baseline.tokens_per_s)
            traces.append(trace)
            same = sum(_agree(one, other) for one, other in zip(plain, ours, strict=True))
    last = traces[-1]
    return {
        "gamma": gamma,
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
