"""Estimates the tokens gained by drafting, from what a draft worker can observe.

Between two proposals of a session the target made `emitted - accepted` steps, since each step emits one token
of the target's own. They took the time from the answer to the next request, so a token of plain decoding
would take

    plain_s = (next request - answer) / (emitted - accepted)

and drafting gained the accepted tokens, less those that plain decoding would have emitted during drafting:

    gain = accepted - draft_s / plain_s,    draft_s = answer - request

The steps took longer because they verified a proposal, and messages count as their time, so this
overestimates the gain: in simulation by 0.18 to 0.51 of the speed of plain decoding, the more a row costs.
Where that matters the orchestrator's gamma controller, which measures it, requests no proposals, and the gain
is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gammaray.types import MAX_GAMMA, Proposal

__all__ = ["GainMeter", "num_accepted"]

_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class _Sent:
    proposal: Proposal
    base_position: int
    asked: float
    answered: float


class GainMeter:
    """Sums the gain over all sessions.

    Attributes:
        gained: Tokens gained so far.
    """

    def __init__(self) -> None:
        self.gained = 0.0
        self._sent: dict[str, _Sent] = {}

    def sent(
        self, session_id: str, proposal: Proposal, base_position: int, asked: float, answered: float
    ) -> None:
        """Note a proposal; times are those of `time.monotonic`."""
        self._sent[session_id] = _Sent(proposal, base_position, asked, answered)

    def asked(self, session_id: str, tokens: Sequence[int], arrived: float) -> None:
        """Note the next request of a session, with its committed tokens."""
        sent = self._sent.pop(session_id, None)
        if sent is None or len(tokens) <= sent.base_position:
            return
        emitted = tokens[sent.base_position :]
        accepted = num_accepted(sent.proposal, emitted)
        plain_s = max(arrived - sent.answered, _SHORTEST_S) / max(1, len(emitted) - accepted)
        # The cost of a proposal is capped at the tokens that the longest one could have gained.
        self.gained += accepted - min(MAX_GAMMA, (sent.answered - sent.asked) / plain_s)

    def drop(self, session_id: str) -> None:
        """Forget a session."""
        self._sent.pop(session_id, None)


def num_accepted(proposal: Proposal, emitted: Sequence[int]) -> int:
    """Return how many of the first emitted tokens form a path of the proposal."""
    node, depth = -1, 0
    for token_id in emitted:
        node = _child(proposal, node, token_id)
        if node < 0:
            return depth
        depth += 1
    return depth


def _child(proposal: Proposal, parent: int, token_id: int) -> int:
    """Return the child of node `parent` (-1: of the root) that has the token; -1 for none."""
    parents = proposal.parents
    for node in range(parent + 1, len(proposal)):
        if (
            proposal.token_ids[node] == token_id
            and (node - 1 if parents is None else parents[node]) == parent
        ):
            return node
    return -1
