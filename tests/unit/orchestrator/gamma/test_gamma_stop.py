"""Chains that the draft ends early: what is learned from them, and when the controller wants them short."""

from __future__ import annotations

import random

import pytest

from gammaray.blocks import Shape, VerifyTiming
from gammaray.types import DrafterKind, TokenOrigin
from orchestrator.cycle.types import Cycle
from orchestrator.gamma.adaptive import AdaptiveGamma
from orchestrator.gamma.cost_model import CostModel, first_children

BASE_S, HOP_S, DRAFT_S = 1.6e-3, 0.5e-3, 0.12e-3


def cycle(shape: Shape, num_drafted: int, num_accepted: int, row_s: float = 0.24e-3) -> Cycle:
    draft_s = HOP_S + DRAFT_S * num_drafted if shape.depth else 0.0
    step_s = BASE_S + row_s * num_drafted
    levels = [(1, 0)] * num_accepted + ([] if num_accepted == num_drafted else [(1, -1)])
    return Cycle(
        gamma=shape.depth,
        num_drafted=num_drafted,
        num_tested=min(num_drafted, num_accepted + 1),
        num_accepted=num_accepted,
        token_ids=(1,) * (num_accepted + 1),
        origins=(TokenOrigin.ACCEPTED,) * num_accepted + (TokenOrigin.BONUS,),
        logprobs=(),
        text="",
        finish_reason=None,
        draft_s=draft_s,
        verify_s=step_s,
        total_s=draft_s + step_s,
        is_first=False,
        draft_failed=False,
        shape=shape,
        levels=tuple(levels),
        timing=VerifyTiming(0.0, step_s, 1, num_drafted + 1),
        drafter=DrafterKind.MODEL,
    )


@pytest.mark.parametrize(
    ("threshold", "drafted", "accepted", "counted"),
    [
        (0.3, 3, 3, (4, 3)),  # ended by the draft: the next token counts as one that failed
        (0.3, 3, 1, (2, 1)),
        (0.3, 8, 8, (8, 8)),  # ended by the depth
        (0.0, 3, 3, (3, 3)),  # ended by the draft's context
    ],
)
def test_chain_ended_by_the_draft_counts_as_a_failure(threshold, drafted, accepted, counted):
    assert first_children(cycle(Shape(8, stop_threshold=threshold), drafted, accepted)) == counted


def play(row_s: float, *, uses_stops: bool, seed: int = 3, num_cycles: int = 3000) -> tuple[float, float]:
    """Return tokens per second and the mean threshold, over text that is easy and hard in turn.

    The draft knows which: its tokens are accepted with the probability that it believes.
    """
    rng, controller = random.Random(seed), AdaptiveGamma(8, CostModel(random.Random(seed)), 0)
    tokens = seconds = 0.0
    thresholds = []
    for _ in range(num_cycles):
        shape = controller.next_shape()
        if not uses_stops:
            shape = Shape(shape.depth, shape.max_nodes, reason=shape.reason)
        believed = [rng.choice((0.97, 0.97, 0.4)) for _ in range(shape.depth)]
        drafted, weight = 0, 1.0
        for confidence in believed:
            weight *= confidence
            if drafted and weight < shape.stop_threshold:
                break
            drafted += 1
        accepted = 0
        while accepted < drafted and rng.random() < believed[accepted]:
            accepted += 1
        done = cycle(shape, drafted, accepted, row_s)
        controller.observe(done)
        tokens, seconds = tokens + accepted + 1, seconds + done.total_s
        thresholds += [shape.stop_threshold] if shape.stop_threshold else []
    return tokens / seconds, sum(thresholds) / max(1, len(thresholds))


def test_adaptive_with_early_ends_is_faster_than_without():
    with_stops, _ = play(0.24e-3, uses_stops=True)
    without, _ = play(0.24e-3, uses_stops=False)
    assert with_stops > 1.04 * without


def test_adaptive_ends_chains_earlier_where_tokens_cost_more():
    cheap, dear = play(0.05e-3, uses_stops=True)[1], play(0.4e-3, uses_stops=True)[1]
    assert 0 < cheap < dear < 0.8


def test_adaptive_threshold_is_price_over_worth():
    """A token more takes 0.36 ms; at the speed reached that is how likely it must be."""
    speed, threshold = play(0.24e-3, uses_stops=True)
    assert threshold == pytest.approx(0.36e-3 * speed, rel=0.2)
