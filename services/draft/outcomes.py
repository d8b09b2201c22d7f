"""Draft-ahead: while the target verifies a proposal, the next ones are prepared for its likely outcomes.

An outcome is (last accepted node, the target's next token): the node at which the next cycle's context will
end. Each outcome that is likely enough becomes a branch: the proposal that would be asked for there is read
off the tree, and the open nodes that it runs into are fed, those of several branches in one forward. When
the context arrives and names a branch, its proposal is there.

Why this is exact for every method. A prediction is a pure function of the path, a choice one of the path and
the cycle's base position, and an outcome fixes the base. So what is prepared is, token by token and law by
law, what would have been drafted after the context arrived: drafting ahead is memoisation, and whether a
proposal was in the memo tells its content nothing. With coupled and greedy verification this holds for any
memo; with rejection it rests on the draft's draws being keyed by base and position (`Noise.draft_bits`), so
that a position drafted again after a rejection is drawn afresh.

Nor does the bonus token need the care that ALGORITHMS 7.1 asks for. There, tokens in flight are *proposals*
for the place of the bonus: to keep them when the target's bonus happens to agree would test them by
agreement, which is exact but rarely succeeds, and to choose by their value would be biased. Here nothing is
in flight: the target draws its bonus (or correction) from its own law as if there were no draft, and only
then is looked up whether that very token was among those guessed. A wrong guess costs work, never law. The
price is the hit rate: under shared noise the target's next token is nearly always the draft's own or its
runner-up, under rejection it is as hard to guess as any draw from p.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from services.draft.proposals import ProposalBuilder
from services.draft.tree import Node

__all__ = ["Outcome", "OutcomeSet"]

MAX_BRANCHES = 8
"""Outcomes followed per proposal, at most."""


class Outcome:
    """The proposal for one outcome, in the making."""

    __slots__ = ("is_taken", "open_nodes", "probability", "reading")

    def __init__(self, probability: float, reading: ProposalBuilder) -> None:
        self.probability, self.reading = probability, reading
        self.is_taken = False
        self.open_nodes = reading.go_on()

    def go_on(self) -> list[Node]:
        """Read on when the nodes that were open no longer are; return those that are open."""
        if self.open_nodes and self.open_nodes[0].prediction is not None:
            self.open_nodes = self.reading.go_on()
        return self.open_nodes


class OutcomeSet:
    """What may be asked for next, after one proposal.

    Args:
        sent: The proposal that was sent.
        start: Begins to read the proposal below an outcome's node; None when nothing will be asked for there.
        floor: Outcomes less likely than this are left alone.

    Attributes:
        branches: The outcomes that are followed, likeliest first.
    """

    def __init__(
        self, sent: ProposalBuilder, start: Callable[[Node], ProposalBuilder | None], floor: float
    ) -> None:
        self._sent, self._start, self._floor = sent, start, floor
        self.branches: list[Outcome] = []
        self._leaves: list[tuple[float, Node]] = []
        ends, leaves = sent.outcomes()
        self._leaves = [(weight, node) for weight, node in leaves if weight >= floor]
        self._branch_off(ends)

    @property
    def covered(self) -> float:
        """The probability of the outcomes whose proposals are whole."""
        return sum(branch.probability for branch in self.branches if not branch.open_nodes)

    def take_whole(self, least: float) -> list[ProposalBuilder]:
        """Return the proposals that are whole, likeliest first, each once.

        Args:
            least: None is returned while they are less likely together.
        """
        whole = [branch for branch in self.branches if not branch.is_taken and not branch.go_on()]
        if sum(branch.probability for branch in whole) < least:
            return []
        for branch in whole:
            branch.is_taken = True
        return [branch.reading for branch in whole]

    def wanted(self) -> list[tuple[float, Node, int]]:
        """Return the nodes to feed next; none at the end.

        Each comes with the probability that it is of use, and the number of forwards along its line that may
        be taken in one call.
        """
        opened = [(weight, node) for weight, node in self._leaves if node.prediction is not None]
        if opened:
            self._leaves = [(weight, node) for weight, node in self._leaves if node.prediction is None]
            for weight, node in opened:
                assert node.prediction is not None
                guesses = self._sent.guesses(node.prediction, is_tested=False)
                self._branch_off([(weight * share, node, token_id) for token_id, share in guesses])
        wanted = [(weight, node, self._sent.longest_run) for weight, node in self._leaves]
        for branch in self.branches:
            wanted += [(branch.probability, node, branch.reading.run_length) for node in branch.go_on()]
        return wanted

    def _branch_off(self, ends: list[tuple[float, Node, int]]) -> None:
        for probability, node, token_id in ends:
            if probability < self._floor:
                continue
            reading = self._start(node.child(token_id))
            if reading is not None:
                bisect.insort(self.branches, Outcome(probability, reading), key=_unlikeliness)
        del self.branches[MAX_BRANCHES:]


def _unlikeliness(branch: Outcome) -> float:
    return -branch.probability
