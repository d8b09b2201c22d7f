"""The shapes of proposals that an adaptive controller considers, and when it tries them again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from orchestrator.cycle.types import Shape

__all__ = [
    "Family",
    "ProbeSchedule",
    "all_shapes",
    "family",
]

PROBE_SHARE = 0.01
"""Share of the time that probing one kind may cost."""

MIN_GAP, MAX_GAP = 8, 64
"""Cycles between two probes of a family, before the expected loss is looked at."""

FREE_PROBES = 3
"""Probes of a family in a row that are made whatever they are expected to cost: a belief may be wrong."""

OWN_PATIENCE = 8
"""A session waits so many times longer when others have probed."""

REFUTED = 1.5
"""A probe that shows a kind so many times as fast as thought has refuted the belief."""

CLOSE = 0.93
"""A kind that reaches this share of the best speed is looked at again soon."""

LOSS_RATE, MOST_LOST = 0.5, 0.5
"""Weight of the last probe in the mean of what a cycle of them cost, and as how much that counts at most:
what once was awful is looked at again."""


class Family(str, Enum):
    """Kinds of shapes, and of probes."""

    PLAIN = "plain"
    CHAIN = "chain"
    TREE = "tree"
    DEEPER = "deeper"


def family(shape: Shape) -> Family:
    """Return the family of a shape."""
    if shape.depth == 0:
        return Family.PLAIN
    return Family.TREE if shape.max_nodes > shape.depth else Family.CHAIN


@dataclass
class _State:
    gap: int = MIN_GAP
    num_confirmed: int = 0
    played_at: float = 0.0
    lost: float = 0.0


@dataclass
class ProbeSchedule:
    """What all sessions of a replica know of probing.

    Attributes:
        clock: Cycles so far of the sessions that probe, those in one batch counted once: what probes may cost
            is a share of these.
    """

    clock: float = 0.0
    _states: dict[Family, _State] = field(default_factory=lambda: {kind: _State() for kind in Family})

    def played(self, kind: Family) -> None:
        """Take note that a family was played just now."""
        self._states[kind].played_at = self.clock

    def num_confirmed(self, kind: Family) -> int:
        """Return how many probes in a row confirmed the belief."""
        return self._states[kind].num_confirmed

    def waited(self, kind: Family, own: int) -> int | None:
        """Return for how many cycles a kind was not played, None while it is too early for a probe.

        What one session finds out serves all of them, but for its own acceptance.

        Args:
            kind: What to probe.
            own: Cycles of this session since it played it.
        """
        state = self._states[kind]
        waited = round(max(own / OWN_PATIENCE, self.clock - state.played_at))
        return waited if waited >= state.gap else None

    def needed_wait(self, kind: Family, length: int, loss: float) -> float:
        """Return for how many cycles a kind must not have been played before a probe is within the bound.

        Args:
            kind: What to probe.
            length: Cycles of the probe.
            loss: What each is expected to cost, in cycles of the present shape.
        """
        state = self._states[kind]
        if state.num_confirmed < FREE_PROBES:
            return 0.0
        return length * max(loss, min(state.lost, MOST_LOST)) / PROBE_SHARE

    def probed(self, kind: Family, share: float, before: float, lost: float) -> None:
        """Take note of what a probe showed.

        Args:
            kind: What was probed.
            share: Of the best speed, that the kind reaches by now.
            before: The same as it was believed before.
            lost: Tokens that the present shape would have brought in a cycle of the probe, beyond those.
        """
        state = self._states[kind]
        if kind in (Family.CHAIN, Family.TREE):  # where a drafter catches up first; else the model knows
            state.lost += LOSS_RATE * (lost - state.lost)
        if share > REFUTED * before:
            state.gap, state.num_confirmed = MIN_GAP, 0
            return
        state.num_confirmed += 1
        state.gap = 2 * MIN_GAP if share >= CLOSE else min(2 * state.gap, MAX_GAP)


TREE_DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
TREE_NODES = (3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Trees that are considered, within the request's bounds."""


def all_shapes(max_gamma: int, max_nodes: int) -> list[Shape]:
    """Return plain decoding, the chains and some trees with at most so many levels and nodes."""
    chains = [Shape(gamma) for gamma in range(max_gamma + 1)]
    depths = [depth for depth in TREE_DEPTHS if depth <= max_gamma]
    return chains + [Shape(d, n) for d in depths for n in TREE_NODES if d < n <= max_nodes]
