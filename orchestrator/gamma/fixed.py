"""The gamma controller that always chooses the same shape, and the reasons that controllers give."""

from __future__ import annotations

from enum import Enum

from gammaray.blocks import Shape
from gammaray.types import DrafterKind
from orchestrator.cycle.types import Cycle
from orchestrator.gamma.cost_model import CostModel

__all__ = ["FixedGamma", "Reason"]


class Reason(str, Enum):
    """Why a shape was chosen."""

    FIXED = "fixed"
    OFF = "off"
    NO_DRAFTER = "no drafter"
    FIRST = "costs unknown"
    BEST = "best"
    FORCED = "forced by the grammar"


class FixedGamma:
    """Always chooses the same shape; implements the cycle's GammaController.

    Args:
        gamma: Depth of the shape.
        costs: Shared by the sessions of this replica; learns from these cycles too.
        max_nodes: Above `gamma` for trees.
        reason: Reason to report; by default `FIXED`, or `OFF` for gamma 0.
        drafter: Kind of the drafter.
    """

    def __init__(
        self,
        gamma: int,
        costs: CostModel,
        max_nodes: int = 0,
        reason: Reason | None = None,
        drafter: DrafterKind = DrafterKind.MODEL,
    ) -> None:
        reason = reason or (Reason.FIXED if gamma else Reason.OFF)
        self._shape = Shape(gamma, max_nodes, reason=reason.value, drafter=drafter)
        self._costs = costs
        self._was_plain = True

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""
        return self._shape

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
        self._costs.observe(cycle, was_plain=self._was_plain)
        self._was_plain = cycle.num_drafted == 0
