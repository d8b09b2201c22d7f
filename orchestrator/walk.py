"""What verification met on its way down a proposal."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.types import Proposal

__all__ = ["Level", "walk"]

Level = tuple[int, int]
"""Children that stood at one level of the walk, and which of them was accepted; -1 when none was."""


def walk(proposal: Proposal, accepted_path: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels that were walked, from the root down: all that the walk tells about acceptance.

    Args:
        proposal: A chain or a tree; children are ranked by their order in it.
        accepted_path: Indexes of the accepted nodes.
    """
    if proposal.parents is None:
        levels: list[Level] = [(1, 0)] * len(accepted_path)
        return tuple(levels) if len(levels) == len(proposal) else (*levels, (1, -1))
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(node)
    levels, parent = [], -1
    for node in accepted_path:
        siblings = children[parent]
        levels.append((len(siblings), siblings.index(node)))
        parent = node
    if parent in children:
        levels.append((len(children[parent]), -1))
    return tuple(levels)
