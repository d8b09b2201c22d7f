"""What trees gain over chains, learned from all sessions of a replica."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.maths.theory import tree_tokens
from orchestrator.cycle.types import Level

__all__ = ["TreeModel"]

FIRST_RESCUE = (0.55, 0.45, 0.4)
"""Probability that the second, third, fourth child is the target's token given that those before are not. In
simulation under shared noise the drafter's next 1, 2, 4 guesses hold it in 66, 85, 96 % of the mismatches."""

STRENGTH = 20.0
"""What the assumptions are worth: tested children for `FIRST_RESCUE`, cycles for a model without bias."""


class TreeModel:
    """Expected tokens of trees: a model from acceptance by depth and rank, corrected by what was measured.

    The model is that of the best tree whose shape is fixed; the drafter's, which knows where it is unsure,
    may be better, and a drafter without trees is worse. So the accepted lengths correct it.

    Args:
        decay: Factor on what is known per cycle with a tree.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._tested = [STRENGTH] * len(FIRST_RESCUE)
        self._rescued = [STRENGTH * share for share in FIRST_RESCUE]
        self._emitted = self._expected = STRENGTH

    @property
    def bias(self) -> float:
        """Measured over expected tokens."""
        return self._emitted / self._expected

    def observe(self, levels: Sequence[Level], expected: float) -> None:
        """Learn from a cycle with a tree.

        Args:
            levels: What verification met.
            expected: Tokens that the model promised, before correction.
        """
        for num_children, rank in levels:
            last = rank if rank >= 0 else num_children - 1
            for sibling in range(1, min(last, len(FIRST_RESCUE)) + 1):
                self._tested[sibling - 1] = self._tested[sibling - 1] * self._decay + 1.0
                self._rescued[sibling - 1] = self._rescued[sibling - 1] * self._decay + (sibling == rank)
        emitted = 1.0 + sum(rank >= 0 for _, rank in levels)
        self._emitted = self._emitted * self._decay + emitted
        self._expected = self._expected * self._decay + expected

    def model(self, by_depth: Sequence[float], max_nodes: int) -> list[float]:
        """Return the expected tokens of trees with 1 ... `max_nodes` nodes, or as many as there can be.

        Args:
            by_depth: Probability that the first child is accepted, at each depth that is allowed.
            max_nodes: Upper bound of nodes.
        """
        rescue = [hit / tested for hit, tested in zip(self._rescued, self._tested, strict=True)]
        return tree_tokens(by_depth, rescue, max_nodes)
