"""Runs controllers of gamma in simulated worlds and compares their speed with that of an oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.worlds import World
from gammaray.blocks import Shape, VerifyTiming
from gammaray.types import DrafterKind, TokenOrigin
from orchestrator.cycle.types import Candidates, Cycle, Level

UNIT_S = 4e-3

MODEL_ONLY = Candidates(DrafterKind.MODEL)
"""What can be proposed in a simulation."""


class Controller(Protocol):
    """A controller of `orchestrator.control`, or one that is compared with them."""

    def next_shape(self, candidates: Candidates) -> Shape:
        """Return the shape of the next cycle's proposal."""

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""


@dataclass
class Run:
    """What a stretch of cycles gave.

    Args:
        tokens: Expected tokens; expected, as the luck of single draws says nothing about a controller.
        units: Expected time.
        shapes: What was chosen.
    """

    tokens: float = 0.0
    units: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per unit."""
        return self.tokens / self.units


class Lone:
    """A session that has the workers to itself.

    Args:
        rng: Where luck comes from.
        cold_drafts: Proposals of a fresh drafter that take ten times as long.
    """

    def __init__(self, rng: random.Random, cold_drafts: int = 0) -> None:
        self._rng, self._cold_drafts = rng, cold_drafts
        self._has_drafted = False

    def cycle(self, world: World, shape: Shape, *, is_first: bool = False) -> tuple[Cycle, float]:
        """Return a cycle and its expected time in units; the first one contains the prefill."""
        draft, mean = 0.0, world.cycle_s(shape)
        if shape.depth > 0:
            is_ready = self._has_drafted and self._rng.random() < world.ahead
            draft = 0.0 if is_ready else world.forwards_s(shape)
            if not self._has_drafted:
                draft += world.catch_up
                mean += world.slow * (world.catch_up + world.ahead * world.forwards_s(shape))
            if self._cold_drafts > 0:
                self._cold_drafts -= 1
                draft *= 10.0
            draft += 2 * world.network
        self._has_drafted = shape.depth > 0
        num_nodes = world.num_nodes(shape)
        step = self._noisy(world, world.step_s(1 + num_nodes)) * (30 if is_first else 1)
        cycle = make_cycle(
            shape,
            world.walk(shape, self._rng),
            num_nodes,
            draft=self._noisy(world, draft),
            verify=step + self._noisy(world, 2 * world.network),
            other=self._noisy(world, world.other),
            timing=VerifyTiming(0.0, step * UNIT_S, 1, 1 + num_nodes, 1 + num_nodes),
            is_first=is_first,
        )
        return cycle, mean

    def _noisy(self, world: World, wait: float) -> float:
        wait *= world.slow * max(0.3, self._rng.gauss(1.0, world.noise))
        return wait * 10 if self._rng.random() < world.spikes else wait


def drive(
    controller: Controller, world: World, num_cycles: int, session: Lone, *, is_new: bool = True
) -> Run:
    """Run cycles of one session; the first one of a new one contains the prefill, which counts nowhere."""
    run = Run()
    for index in range(num_cycles):
        shape = controller.next_shape(MODEL_ONLY)
        cycle, mean = session.cycle(world, shape, is_first=is_new and index == 0)
        controller.observe(cycle)
        run.tokens += world.tokens(shape)
        run.units += mean
        run.shapes.append(shape)
    return run


def crowd(
    controllers: Sequence[Controller],
    worlds: Sequence[World],
    num_rounds: int,
    rng: random.Random,
    *,
    begins_at: float = 0.0,
) -> list[Run]:
    """Run sessions whose proposals one target verifies in one batch, round by round.

    The batch starts when the last proposal is there. Costs of the step are those of the first world, with the
    tokens of all sessions, and its strain.

    Args:
        begins_at: Units of time before the first round.

    Returns:
        One run per session; all have the same time.
    """
    runs = [Run() for _ in worlds]
    for index in range(num_rounds):
        shapes = [controller.next_shape(MODEL_ONLY) for controller in controllers]
        drafts = [world.draft_s(shape) for world, shape in zip(worlds, shapes, strict=True)]
        num_tokens = sum(1 + world.num_nodes(shape) for world, shape in zip(worlds, shapes, strict=True))
        drafting = sum(shape.depth > 0 for shape in shapes) / len(shapes)
        step = worlds[0].step_s(num_tokens) * (1.0 + worlds[0].strain * drafting)
        network, other = 2 * worlds[0].network, worlds[0].other
        for run, controller, world, shape, draft in zip(
            runs, controllers, worlds, shapes, drafts, strict=True
        ):
            factor = max(0.5, rng.gauss(1.0, world.noise))
            queue = max(drafts) - draft
            controller.observe(
                make_cycle(
                    shape,
                    world.walk(shape, rng),
                    world.num_nodes(shape),
                    draft=draft * factor,
                    verify=(queue + step) * factor + network,
                    other=other,
                    timing=VerifyTiming(
                        queue * factor * UNIT_S, step * factor * UNIT_S, len(worlds), num_tokens, num_tokens
                    ),
                    is_first=index == 0,
                    started=begins_at + run.units,
                )
            )
            run.tokens += world.tokens(shape)
            run.units += max(drafts) + step + network + other
            run.shapes.append(shape)
    return runs


def make_cycle(
    shape: Shape,
    levels: Sequence[Level],
    num_nodes: int,
    *,
    draft: float,
    verify: float,
    other: float,
    timing: VerifyTiming | None = None,
    is_first: bool = False,
    draft_failed: bool = False,
    started: float = 0.0,
) -> Cycle:
    """Return a cycle from times in units; one that failed to draft has no levels."""
    accepted = sum(rank >= 0 for _, rank in levels)
    return Cycle(
        gamma=shape.depth,
        num_drafted=0 if draft_failed else num_nodes,
        num_tested=len(levels),
        num_accepted=accepted,
        token_ids=(0,) * (accepted + 1),
        origins=(TokenOrigin.ACCEPTED,) * accepted + (TokenOrigin.BONUS,),
        logprobs=(),
        text="",
        finish_reason=None,
        draft_s=draft * UNIT_S,
        verify_s=verify * UNIT_S,
        total_s=(draft + verify + other) * UNIT_S,
        is_first=is_first,
        draft_failed=draft_failed,
        shape=shape,
        levels=tuple(levels),
        timing=timing,
        started=started * UNIT_S,
    )
