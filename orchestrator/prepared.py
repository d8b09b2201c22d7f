"""Proposals that a draft worker sent before they were asked for, by the outcome that each is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gammaray.convert import proposal_from_proto
from gammaray.types import Proposal
from gammaray.v1 import draft_service_pb2 as draft_pb
from orchestrator.cycle import Shape

__all__ = ["PreparedProposals"]

MAX_KEPT = 32
"""Outcomes kept per cycle: more than a worker prepares, less than one that is broken could send."""


class PreparedProposals:
    """What came for the cycle under way of one session.

    With every verification method a proposal is the same whether it was prepared or asked for, so taking one
    from here changes when it is there and nothing else.

    Args:
        vocab_size: The target's; proposals with other tokens are refused.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._epoch = self._base_position = 0
        self._by_outcome: dict[tuple[int, ...], draft_pb.AheadProposal] = {}

    def expect(self, epoch: int, base_position: int) -> None:
        """Drop all, and take from now on what is for outcomes of the cycle at this position."""
        self._epoch, self._base_position = epoch, base_position
        self._by_outcome.clear()

    def put(self, message: draft_pb.AheadProposal) -> None:
        """Keep a proposal, if it is for the cycle under way."""
        is_current = message.epoch == self._epoch and message.base_position == self._base_position
        if is_current and len(self._by_outcome) < MAX_KEPT:
            self._by_outcome[tuple(message.token_ids)] = message

    def take(self, token_ids: Sequence[int], shape: Shape) -> Proposal | None:
        """Return the proposal for an outcome, None when there is none that fits.

        A chain is cut where it is too long, which says nothing of its tokens; one that was asked for with a
        smaller gamma does as well.

        Args:
            token_ids: What the cycle emitted.
            shape: What the next proposal may look like.

        Raises:
            GammarayError: The proposal is malformed.
        """
        if len(token_ids) <= self._base_position:
            return None
        message = self._by_outcome.get(tuple(token_ids[self._base_position :]))
        if message is None:
            return None
        proposal = proposal_from_proto(message.proposal, self._vocab_size)
        if proposal.parents is None:
            return _cut(proposal, shape.depth)
        fits = proposal.depth <= shape.depth and len(proposal) <= max(shape.depth, shape.max_nodes)
        return proposal if fits else None


def _cut(chain: Proposal, depth: int) -> Proposal:
    if len(chain) <= depth:
        return chain
    laws = chain.draft_distributions
    return replace(
        chain, token_ids=chain.token_ids[:depth], draft_distributions=None if laws is None else laws[:depth]
    )
