"""Controllers of gamma in simulated worlds, where it is known what cycles cost and what the target accepts.

Times are in units of the target's forward over one token.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from gammaray.blocks import Shape, VerifyTiming
from gammaray.types import DrafterKind, TokenOrigin
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.fixed import FixedGamma
from orchestrator.control.tree_model import tree_tokens
from orchestrator.cycle.types import Candidates, Cycle, Level

UNIT_S = 4e-3

MODEL_ONLY = Candidates((DrafterKind.MODEL,))
"""What can be proposed in a simulation."""


@dataclass(frozen=True)
class World:
    """What the controller does not know.

    Args:
        alpha: Probability that the first child is accepted.
        falling: Factor on it per depth.
        rescue: Probability that the second, third, ... child is accepted, given that none before it was.
        draft: A forward of the draft model: rho.
        network: One way, to each worker.
        per_token: Cost of each proposed token in the target's forward.
        further: Additional cost of each proposed token after the third.
        per_draft_node: Cost of each node off the longest path in drafting, in draft forwards.
        other: Further cost of a cycle.
        ahead: Probability that a proposal was prepared, when the cycle before had one too.
        catch_up: Cost of feeding what the drafter missed.
        noise: Relative standard deviation of each wait.
        spikes: Share of waits that take ten times as long.
        slow: Factor on all waits: the machine is busy.
        slow_draft: Factor on the draft's forwards.
        is_parallel: Whether one forward of the draft drafts a whole proposal.
        strain: By how much the target's step is slower when all sessions of a crowd draft: shared cores.
    """

    alpha: float = 0.8
    falling: float = 1.0
    rescue: tuple[float, ...] = (0.6, 0.5, 0.4)
    draft: float = 0.05
    network: float = 0.05
    per_token: float = 0.02
    further: float = 0.0
    per_draft_node: float = 0.05
    other: float = 0.1
    ahead: float = 0.0
    catch_up: float = 0.5
    noise: float = 0.15
    spikes: float = 0.01
    slow: float = 1.0
    slow_draft: float = 1.0
    is_parallel: bool = False
    strain: float = 0.0

    def by_depth(self, depth: int) -> tuple[float, ...]:
        """Return the first child's acceptance at each depth."""
        return tuple(self.alpha * self.falling**level for level in range(depth))

    def num_nodes(self, shape: Shape) -> int:
        if shape.max_nodes <= shape.depth:
            return shape.depth
        return len(_tree(self.by_depth(shape.depth), self.rescue, shape.max_nodes))

    def tokens(self, shape: Shape) -> float:
        if shape.depth == 0:
            return 1.0
        if shape.max_nodes <= shape.depth:
            return tree_tokens(self.by_depth(shape.depth), (), shape.depth)[-1]
        return [1.0, *tree_tokens(self.by_depth(shape.depth), self.rescue, self.num_nodes(shape))][-1]

    def draft_s(self, shape: Shape) -> float:
        """Return the mean wait for a proposal, the drafter being up to date, in units."""
        if shape.depth == 0:
            return 0.0
        return 2 * self.network + (1 - self.ahead) * self.forwards_s(shape)

    def forwards_s(self, shape: Shape) -> float:
        """Return the mean of drafting a proposal that was not prepared, in units."""
        if self.is_parallel:
            return self.draft * self.slow_draft
        off_path = max(0, self.num_nodes(shape) - shape.depth)
        return (shape.depth + off_path * self.per_draft_node) * self.draft * self.slow_draft

    def step_s(self, num_tokens: int) -> float:
        return 1.0 + (num_tokens - 1) * self.per_token + max(0, num_tokens - 4) * self.further

    @property
    def forward_s(self) -> list[float]:
        """What the target worker says of its forwards over 1, 2, 4, 8 and 16 tokens."""
        return [self.step_s(2**size) * UNIT_S for size in range(5)]

    def cycle_s(self, shape: Shape) -> float:
        wait = self.draft_s(shape) + 2 * self.network + self.step_s(1 + self.num_nodes(shape))
        return self.slow * (wait + self.other)

    def speed(self, shape: Shape) -> float:
        """Return expected tokens per unit, at this shape for ever."""
        return self.tokens(shape) / self.cycle_s(shape)

    def best(self, shapes: Iterable[Shape]) -> Shape:
        return max(shapes, key=self.speed)

    def walk(self, shape: Shape, rng: random.Random) -> tuple[Level, ...]:
        """Draw what verification meets."""
        if shape.depth == 0:
            return ()
        by_depth = self.by_depth(shape.depth)
        wide = shape.max_nodes > shape.depth
        nodes = _tree(by_depth, self.rescue if wide else (), max(shape.depth, shape.max_nodes) if wide else 0)
        levels: list[Level] = []
        node, depth = -1, 0
        while True:
            children = [child for child, parent in enumerate(nodes) if parent == node]
            if not children:
                return tuple(levels)
            rank = next(
                (r for r, p in enumerate((by_depth[depth], *self.rescue)) if rng.random() < p), len(children)
            )
            if rank >= len(children):
                return (*levels, (len(children), -1))
            levels.append((len(children), rank))
            node, depth = children[rank], depth + 1


@cache
def _tree(by_depth: tuple[float, ...], rescue: tuple[float, ...], max_nodes: int) -> tuple[int, ...]:
    """Return the parents of the likeliest nodes, siblings in the order of their rank; 0 nodes: the chain."""
    if max_nodes == 0:
        return tuple(range(-1, len(by_depth) - 1))
    parents: list[int] = []
    reached = [1.0]
    frontier: dict[tuple[int, int], tuple[float, int]] = {(-1, 0): (by_depth[0], 0)}
    while frontier and len(parents) < max_nodes:
        (parent, rank), (probability, depth) = max(frontier.items(), key=lambda item: item[1][0])
        if probability < 0.02:
            break
        del frontier[parent, rank]
        parents.append(parent)
        reached.append(probability)
        node = len(parents) - 1
        if depth + 1 < len(by_depth):
            frontier[node, 0] = (probability * by_depth[depth + 1], depth + 1)
        if rank < len(rescue):
            missed = 1.0 - by_depth[depth]
            for share in rescue[:rank]:
                missed *= 1.0 - share
            frontier[parent, rank + 1] = (reached[parent + 1] * missed * rescue[rank], depth)
    return tuple(parents)


def candidates(max_gamma: int, max_nodes: int) -> list[Shape]:
    """Return every shape that the oracle may choose from: all chains, and trees of many sizes."""
    chains = [Shape(gamma) for gamma in range(max_gamma + 1)]
    sizes = [n for n in (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 48, 64) if n <= max_nodes]
    return chains + [Shape(d, n) for d in range(1, max_gamma + 1) for n in sizes if n > d]


@dataclass
class Run:
    """Expected tokens and time of a stretch of cycles, as luck says nothing; and the shapes chosen."""

    tokens: float = 0.0
    units: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per unit."""
        return self.tokens / self.units


class Lone:
    """A session that has the workers to itself; its first `cold_drafts` proposals take ten times as long."""

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
    controller: AdaptiveGamma | FixedGamma,
    world: World,
    num_cycles: int,
    session: Lone,
    *,
    is_new: bool = True,
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
    controllers: Sequence[AdaptiveGamma | FixedGamma],
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
    started: float = 0.0,
) -> Cycle:
    accepted = sum(rank >= 0 for _, rank in levels)
    origins = (TokenOrigin.ACCEPTED,) * accepted + (TokenOrigin.BONUS,)
    counts = {"num_drafted": num_nodes, "num_tested": len(levels), "num_accepted": accepted}
    tokens = {"token_ids": (0,) * (accepted + 1), "origins": origins, "logprobs": (), "text": ""}
    times = {"draft_s": draft, "verify_s": verify, "total_s": draft + verify + other, "started": started}
    return Cycle(
        **{"gamma": shape.depth, "shape": shape, "levels": tuple(levels)},
        **{"timing": timing, "is_first": is_first, "finish_reason": None, "draft_failed": False},
        **{**counts, **tokens, **{name: units * UNIT_S for name, units in times.items()}},
    )
