"""The shapes of proposals among which an adaptive controller chooses."""

from __future__ import annotations

from orchestrator.cycle.types import Shape

__all__ = ["all_shapes"]

TREE_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
TREE_NODES = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Trees that are considered, within the request's bounds."""


def all_shapes(max_gamma: int, max_nodes: int) -> list[Shape]:
    """Return plain decoding, the chains and some trees with at most so many levels and nodes."""
    chains = [Shape(gamma) for gamma in range(max_gamma + 1)]
    depths = [depth for depth in TREE_DEPTHS if depth <= max_gamma]
    return chains + [Shape(d, n) for d in depths for n in TREE_NODES if d < n <= max_nodes]
