"""Draft-ahead: while the target verifies a proposal, the next ones are prepared for its likely outcomes.

An outcome is (last accepted node, the target's next token): the node at which the next cycle's context will
end. Each sufficiently likely outcome becomes a branch: the proposal that would be requested there is read
off the tree, and the open nodes that it reaches are fed, those of several branches in one forward. If the
next context ends at a branch, its proposal is already complete. A complete proposal has outcomes, too: while
the orchestrator is some milliseconds away, it needs those of the verification after the running one, as a
proposal that is begun when the running one has ended comes too late.

Why this is exact for every method: a prediction is a pure function of the path, a choice is a function of the
path and the cycle's base position, and an outcome fixes the base. Prepared tokens and distributions are
therefore identical to those that would be drafted after the context arrived: drafting ahead is memoisation,
and a proposal's content does not depend on whether it was in the memo. With coupled and greedy verification
this holds for any memo; with rejection and block it requires that the draft's draws are keyed by base and
position (`Noise.draft_bits`), so that a position drafted again after a rejection is drawn independently.

The bonus token does not need the precaution of ALGORITHMS 7.1 either. There, tokens in flight are *proposals*
for the position of the bonus: keeping them when the target's bonus equals them would test them by equality,
which is exact but rarely succeeds, and choosing by their value would be biased. Here no token is in flight:
the target draws its bonus (or correction) from its own distribution as if there were no draft, and that token
is then looked up among the guesses. A wrong guess costs work but does not change the distribution. Only the
hit rate varies: under shared noise the target's next token is nearly always the draft's first or second
choice, under rejection it is as hard to guess as any draw from p.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import NamedTuple

from gammaray.types import MAX_GAMMA
from services.speculation.proposals import ProposalBuilder
from services.speculation.tree import Node

AHEAD_ROWS, SESSION_ROWS = 4, 16
"""Upper bound of tokens in one forward of draft-ahead: over all sessions, where each token takes time, and of
one session, where they do not. A block that arrives waits for that forward to end. Of a parallel draft model
at least one block."""

MIN_OUTCOME, MAX_BRANCHES = 0.08, 8
"""With AHEAD_ROWS, outcomes less likely than this are ignored, as one more row costs half a CPU forward, and
no more than these are followed per proposal. With up to SESSION_ROWS more are followed, in proportion."""

MAX_LEVELS = 2
"""Upper bound of verifications whose outcomes are followed: the running one, and the one after it."""


class Outcome:
    """The proposal for one outcome, complete or not.

    Attributes:
        level: How many verifications end before the proposal is wanted.
    """

    __slots__ = ("is_followed", "is_taken", "level", "open_nodes", "probability", "reading")

    def __init__(self, probability: float, reading: ProposalBuilder, level: int) -> None:
        self.probability, self.reading, self.level = probability, reading, level
        self.is_taken = self.is_followed = False
        self.open_nodes = reading.advance()

    def advance(self) -> list[Node]:
        """Continue reading once the open nodes have predictions; return the nodes that are open now."""
        if self.open_nodes and self.open_nodes[0].prediction is not None:
            self.open_nodes = self.reading.advance()
        return self.open_nodes


class _Leaf(NamedTuple):
    """An open node after which the verification of a proposal may end."""

    weight: float
    node: Node
    proposal: ProposalBuilder
    level: int


class OutcomeSet:
    """The likely outcomes of one proposal, and of those that follow it, with the next proposal for each.

    Args:
        start: Begins to read the proposal below an outcome's node; returns None if none will be requested.
        max_rows: Tokens in a forward at most.
        max_levels: Of the outcomes that are followed.

    Attributes:
        branches: The outcomes that are followed, likeliest first.
    """

    def __init__(
        self,
        sent: ProposalBuilder,
        start: Callable[[Node], ProposalBuilder | None],
        max_rows: int,
        max_levels: int,
    ) -> None:
        self._start, self._first, self._max_levels = start, sent.root.position, max_levels
        breadth = max(1.0, min(max_rows, SESSION_ROWS) / AHEAD_ROWS)
        self._min_outcome, self._max_branches = MIN_OUTCOME / breadth, round(MAX_BRANCHES * breadth)
        self.branches: list[Outcome] = []
        self._leaves: list[_Leaf] = []
        self._follow(sent, 1.0, 1)

    def take_whole(self, least: float) -> list[ProposalBuilder]:
        """Return the complete proposals, likeliest first, each once, if they are `least` likely together."""
        whole = [branch for branch in self.branches if not branch.is_taken and not branch.advance()]
        if sum(branch.probability for branch in whole) < least:
            return []
        for branch in whole:
            branch.is_taken = True
        return [branch.reading for branch in whole]

    def wanted(self) -> list[tuple[float, Node, int]]:
        """Return the nodes to feed next; none when all branches are complete.

        Each is a tuple (probability that the node is needed, node, number of forwards along its chain that
        may run in one call).
        """
        for branch in list(self.branches):
            if branch.level < self._max_levels and not branch.is_followed and not branch.advance():
                branch.is_followed = True
                self._follow(branch.reading, branch.probability, branch.level + 1)
        opened = [leaf for leaf in self._leaves if leaf.node.prediction is not None]
        self._leaves = [leaf for leaf in self._leaves if leaf.node.prediction is None]
        for weight, node, proposal, level in opened:
            assert node.prediction is not None
            guesses = proposal.guesses(node.prediction, is_tested=False)
            self._branch_off([(weight * share, node, token_id) for token_id, share in guesses], level)
        wanted = [(leaf.weight, leaf.node, leaf.proposal.longest_run) for leaf in self._leaves]
        for branch in self.branches:
            if nodes := branch.advance():
                # A slow draft is asked for what is ready, and only a whole proposal is sent unasked.
                weight = branch.probability * (branch.reading.reach if self._max_levels == 1 else 1.0)
                wanted += [(weight, node, branch.reading.run_length) for node in nodes]
        return wanted

    def _follow(self, proposal: ProposalBuilder, weight: float, level: int) -> None:
        """Follow the outcomes of a complete proposal that is verified with probability `weight`."""
        ends, leaves = proposal.outcomes()
        found = [_Leaf(weight * share, node, proposal, level) for share, node in leaves]
        self._leaves += [leaf for leaf in found if leaf.weight >= self._min_outcome]
        self._branch_off([(weight * share, node, token_id) for share, node, token_id in ends], level)

    def _branch_off(self, ends: list[tuple[float, Node, int]], level: int) -> None:
        for probability, node, token_id in ends:
            if probability < self._min_outcome or node.position + 1 - self._first > MAX_GAMMA + 1:
                continue  # unlikely, or more tokens than one message may name
            reading = self._start(node.child(token_id))
            if reading is not None:
                outcome = Outcome(probability, reading, level)
                bisect.insort(self.branches, outcome, key=lambda branch: -branch.probability)
        del self.branches[self._max_branches :]
