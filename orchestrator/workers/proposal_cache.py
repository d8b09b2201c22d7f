"""Cache of lookahead proposals, which a draft worker sends before they are requested, by outcome."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.blocks import Shape
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.types import MAX_GAMMA, MAX_NODES, Proposal
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import proposal_from_proto

MAX_KEPT = 64
"""Outcomes kept per cycle: more than a worker prepares; bounds what a broken worker can store."""

MAX_SEEN = 4 * MAX_KEPT
"""A worker that sends more proposals than this for one cycle is broken."""

MAX_KEPT_BYTES = 2**20
"""Bytes kept per cycle; proposals beyond this are dropped, and requested normally when needed."""

MAX_OUTCOME = MAX_GAMMA + 1
"""Tokens of an outcome: what a cycle emits at most, the deepest path and the target's own token."""

NOTHING = -1
"""A base position that no message can have."""


class ProposalCache:
    """Lookahead proposals for the cycles of one session, by the tokens of the outcome that they continue.

    With every verification method a proposal is the same whether it was prepared or requested, so using a
    cached one changes its latency only. A worker also prepares for the cycle after the one that it knows of.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._epoch, self._base_position = 0, NOTHING
        self._known_from, self._emitted = 0, list[int]()
        self.by_outcome: dict[tuple[int, ...], bytes] = {}
        self._num_seen = self.num_bytes = 0
        self._offence: GammarayError | None = None

    def expect(self, epoch: int, token_ids: Sequence[int]) -> None:
        """Accept proposals for outcomes of the cycle after these tokens; keep those that it has already."""
        base = len(token_ids)
        if epoch != self._epoch or base < self._base_position:
            self.expect_nothing()
            self._base_position = self._known_from = base
        emitted = token_ids[self._base_position :]
        self.by_outcome = {
            rest: data for outcome, data in self.by_outcome.items() if (rest := _rest(outcome, emitted))
        }
        self.num_bytes = sum(map(len, self.by_outcome.values()))
        self._num_seen, self._offence = 0, None
        self._epoch, self._base_position = epoch, base
        # Messages that are on their way name a cycle before this one.
        self._known_from = max(self._known_from, base - MAX_OUTCOME)
        self._emitted = list(token_ids[self._known_from :])

    def expect_nothing(self) -> None:
        """Drop all proposals, and all that arrive before the next `expect`."""
        self._epoch, self._base_position, self._emitted = 0, NOTHING, []
        self._num_seen = self.num_bytes = 0
        self._offence = None
        self.by_outcome.clear()

    def put(self, message: draft_pb.AheadProposal) -> tuple[int, ...]:
        """Cache a proposal and return the outcome, from the current cycle on; () if it is not kept.

        After an invalid one `take` fails: the session leaves the worker.
        """
        is_known = self._known_from <= message.base_position <= self._base_position
        if message.epoch != self._epoch or not is_known:
            return ()
        self._num_seen += 1
        if self._offence is None:
            self._offence = self._judge(message)
            if self._offence is not None:
                self.by_outcome.clear()
                self.num_bytes = 0
        # A message is part of its frame and would keep the whole frame in memory: only its bytes are kept.
        size = message.proposal.ByteSize()
        is_room = len(self.by_outcome) < MAX_KEPT and self.num_bytes + size <= MAX_KEPT_BYTES
        if self._offence is not None or not is_room:
            return ()
        emitted = self._emitted[message.base_position - self._known_from :]
        outcome = _rest(message.token_ids, emitted)
        if not outcome or outcome in self.by_outcome:
            return ()
        self.by_outcome[outcome] = message.proposal.SerializeToString()
        self.num_bytes += size
        return outcome

    def _judge(self, message: draft_pb.AheadProposal) -> GammarayError | None:
        """Return the error if there are too many proposals, or a size of this one is out of range."""
        if self._num_seen > MAX_SEEN:
            return InvalidArgumentError("ahead", f"more than {MAX_SEEN} for one cycle", f"up to {MAX_SEEN}")
        if not 1 <= len(message.token_ids) <= MAX_OUTCOME:
            return InvalidArgumentError(
                "ahead.token_ids", f"{len(message.token_ids)} ids", f"1 to {MAX_OUTCOME}"
            )
        if len(message.proposal.token_ids) > MAX_NODES:
            num_nodes = len(message.proposal.token_ids)
            return InvalidArgumentError("ahead.proposal", f"{num_nodes} nodes", f"at most {MAX_NODES}")
        return None

    def peek(self, token_ids: Sequence[int], outcome: tuple[int, ...]) -> Proposal | None:
        """Return the proposal after an outcome of the cycle after these tokens; None without a valid one."""
        if len(token_ids) != self._base_position or outcome not in self.by_outcome:
            return None
        try:
            return proposal_from_proto(pb.Proposal.FromString(self.by_outcome[outcome]), self._vocab_size)
        except GammarayError:
            return None  # `take` raises it

    def take(self, token_ids: Sequence[int], shape: Shape) -> Proposal | None:
        """Return the proposal for an outcome, None if there is none within `shape`.

        A chain that is too long is truncated, which does not depend on its tokens; a chain drafted for a
        smaller gamma is used as it is. A malformed proposal for this cycle is an error.
        """
        if self._offence is not None:
            raise self._offence
        if self._base_position == NOTHING or len(token_ids) <= self._base_position:
            return None
        data = self.by_outcome.get(tuple(token_ids[self._base_position :]))
        if data is None:
            return None
        proposal = proposal_from_proto(pb.Proposal.FromString(data), self._vocab_size)
        if proposal.parents is None:
            return proposal if len(proposal) <= shape.depth else proposal.path(range(shape.depth))
        fits = proposal.depth <= shape.depth and len(proposal) <= max(shape.depth, shape.max_nodes)
        return proposal if fits else None


def _rest(outcome: Sequence[int], emitted: Sequence[int]) -> tuple[int, ...]:
    """Return what is left of an outcome after emitted tokens; nothing if it was another one."""
    count = len(emitted)
    return tuple(outcome[count:]) if tuple(outcome[:count]) == tuple(emitted) else ()
