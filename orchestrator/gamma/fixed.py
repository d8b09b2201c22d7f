"""The controller that always chooses the same, and what every controller learns for the others."""

from __future__ import annotations

from enum import Enum

from orchestrator.cycle.types import Cycle, Shape
from orchestrator.gamma.cost_model import CostModel
from orchestrator.gamma.shapes import Family, family

__all__ = ["FixedGamma", "Learner", "Reason", "first_children", "stopped_early"]


class Reason(str, Enum):
    """Why a shape was chosen."""

    FIXED = "fixed"
    OFF = "off"
    NO_DRAFTER = "no drafter"
    FIRST = "costs unknown"
    BEST = "best"
    HELD = "held by hysteresis"
    LOAD = "plain decoding gives more under this load"
    EXPLORE = "near best, untried for long"
    PROBE_PLAIN = "probe of plain decoding"
    PROBE_CHAIN = "probe of chains"
    PROBE_TREE = "probe of trees"
    PROBE_DEEPER = "probe of deeper proposals"


class Learner:
    """What fixed and adaptive controllers learn from a cycle for the other sessions."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._depth_before = 0

    def learn(self, cycle: Cycle, kind: Family) -> None:
        """Pass costs and acceptance on; a wait for the draft counts when the drafter was up to date."""
        self._costs.observe(cycle, depth_before=self._depth_before)
        self._depth_before = cycle.gamma if cycle.num_drafted > 0 else 0
        self._costs.acceptance.observe(*first_children(cycle))
        if kind is Family.CHAIN and cycle.num_drafted > 0:
            self._costs.reach.observe(cycle.num_drafted + stopped_early(cycle), cycle.num_drafted)
        if kind is Family.PLAIN or cycle.num_drafted > 0:
            self._costs.probes.played(kind)


class FixedGamma:
    """Always the same shape; implements the cycle's GammaController.

    Args:
        gamma: The gamma.
        costs: Learns from these cycles too.
        max_nodes: Above `gamma` for trees.
        reason: Why so.
    """

    def __init__(
        self, gamma: int, costs: CostModel, max_nodes: int = 0, reason: Reason | None = None
    ) -> None:
        reason = reason or (Reason.FIXED if gamma else Reason.OFF)
        self._shape = Shape(gamma, max_nodes, reason.value)
        self._learner = Learner(costs)

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""
        return self._shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._learner.learn(cycle, family(cycle.shape))


def first_children(cycle: Cycle) -> tuple[int, int]:
    """Return how many first children were tested and how many of them accepted, down to the first failure.

    Of a chain these are all tokens; of a tree, the chain that it contains. Where a chain ended early because
    the draft did not trust its next token, that counts as a failure of this token: what is counted is how far
    proposals get, not how good tokens would be.
    """
    accepted = 0
    for _, rank in cycle.levels:
        if rank != 0:
            return accepted + 1, accepted
        accepted += 1
    return accepted + stopped_early(cycle), accepted


def stopped_early(cycle: Cycle) -> bool:
    """Whether the draft ended its chain before the depth that it was allowed."""
    shape = cycle.shape
    return shape.stop_threshold > 0 and 0 < cycle.num_drafted < shape.depth
