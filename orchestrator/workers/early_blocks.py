"""Blocks that are sent to the target worker before the verdict of the block that they follow.

While a verification runs, a draft worker prepares the proposals for its likely outcomes. The block of the
next cycle is sent as soon as such a proposal is here. Where the verdict has that outcome, the worker verifies
the block in its next step, so that no step waits for the orchestrator.

A proposal that is sent depends on an outcome that is guessed, never on the noise of a later token. The target
draws its own tokens with coupled verification and at temperature 0, so that the text does not depend on what
was sent; for other methods no block is sent early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from gammaray.types import Proposal, VerificationMethod
from gammaray.v1 import target_service_pb2 as target_pb
from orchestrator.cycle.session import Session
from orchestrator.workers.connection import WorkerConnection

MAX_EARLY = 2
"""Blocks per verification: the two likeliest outcomes of a chain have most of the probability."""

LEAST_PROTOCOL = 2
"""Older workers take every block for one of committed tokens."""


@dataclass(frozen=True)
class EarlyBlock:
    """A block that was sent, and what it is for."""

    end: int  # position after the outcome
    outcome: tuple[int, ...]  # the tokens that the verdict before it is expected to emit
    proposal: Proposal
    block: target_pb.VerifyBlock
    answer: asyncio.Future[target_pb.VerifyResult]

    def suits(self, session: Session, proposal: Proposal) -> bool:
        """Whether it is the block of this cycle; its proposal may be longer."""
        if session.num_committed != self.end or session.token_ids[-len(self.outcome) :] != list(self.outcome):
            return False
        is_chain = proposal.parents is None and len(proposal) > 0
        return is_chain and self.proposal.token_ids[: len(proposal)] == proposal.token_ids


class EarlyBlocks:
    """The early blocks of one session, of the verification in progress."""

    def __init__(self) -> None:
        self._position = -1  # of the block that is verified
        self._offers: list[tuple[int, tuple[int, ...], Proposal]] = []
        self._sent: list[EarlyBlock] = []

    def begin(self, session: Session) -> None:
        """Note that the block of the present cycle is sent, again if there was one."""
        self._position = session.num_committed
        self._sent.clear()

    def take(self, session: Session, proposal: Proposal) -> EarlyBlock | None:
        """Return the block of this cycle if it was sent early; the others are for other outcomes."""
        sent, self._sent = self._sent, []
        return next((early for early in sent if early.suits(session, proposal)), None)

    def offer(self, session: Session, outcome: Sequence[int], proposal: Proposal) -> None:
        """Have the proposal for an outcome of this cycle's verdict sent, if it can be of use."""
        is_coupled = session.method is VerificationMethod.COUPLED or session.params.temperature == 0
        is_free = is_coupled and not (session.lacks_prompt_logprobs or session.params.grammar)
        is_chain = proposal.parents is None and len(proposal) > 0
        goes_on = outcome[-1] not in session.eos_token_ids | session.stop_token_ids
        if is_free and is_chain and goes_on and session.remaining > len(outcome) + len(proposal):
            self._offers.append((session.num_committed, tuple(outcome), proposal))

    def wanted(self, session: Session) -> list[tuple[tuple[int, ...], Proposal]]:
        """Return the outcomes and proposals to send now: none before the block of the cycle is sent."""
        if self._position != session.num_committed:
            return []
        offers, self._offers = self._offers, []
        known = {early.outcome for early in self._sent}
        found = [
            (outcome, proposal)
            for position, outcome, proposal in offers
            if position == self._position and outcome not in known
        ]
        return found[: MAX_EARLY - len(self._sent)]

    def send(
        self,
        session: Session,
        link: WorkerConnection[target_pb.VerifyBlock, target_pb.VerifyResult],
        outcome: tuple[int, ...],
        proposal: Proposal,
        block: target_pb.VerifyBlock,
    ) -> None:
        """Send the block with a proposal for an outcome, after filling in the session's fields."""
        start = session.num_committed
        block.session_id, block.epoch, block.is_conditional = session.session_id, session.epoch, True
        block.base_position = start + len(outcome)
        block.context.start = start
        block.context.token_ids.extend(outcome)
        self._sent.append(EarlyBlock(block.base_position, outcome, proposal, block, link.post(block)))
