"""What a step tells the process that samples, and what it tells back; both travel on vLLM's own objects.

With tensor parallelism that process is another one: everything here can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError
from gammaray.types import Proposal, SparseDistribution

SESSION, SPEC, IS_KEPT = "session", "spec", "is_kept"
"""Keys in the `extra_args` of a session's requests: its name, its spec, and whether it is learnt from."""


@dataclass(frozen=True, slots=True)
class PostedBlock:
    """A block whose rows the step computes; with `known_token_id` nothing is verified."""

    proposal: Proposal  # what is verified: a chain
    base_position: int  # number of committed tokens, the absolute position that row 0 decides
    num_top_logprobs: int | None = None  # alternatives per emitted token; None: no log-probabilities
    draft_depth: int = 0  # tokens that vLLM's own drafter proposes after the step, for the next block
    known_token_id: int | None = None  # committed already at `base_position`; None: the rows decide it


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of grammars, computed during the forward; vLLM passes them in place of its own.

    They are as of `GrammarState.masks`, or why there are none; None: late, and the block gets no verdict.
    """

    by_request: dict[str, Sequence[bytes | None] | GammarayError | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What a draft model draws the tokens of a proposal by."""

    base_position: int  # number of committed tokens, which keys the draft's own draws


@dataclass(frozen=True, slots=True)
class Drafted:
    """The next token of a proposal, and what it was drawn from, where verification needs that."""

    token_id: int
    distribution: SparseDistribution | None = None


States = dict[str, tuple[int, Tensor]]
"""First position and hidden states [positions, taps, hidden_size] of committed tokens, by request."""

Verdicts = dict[str, Verdict | Drafted | GammarayError | None]
"""Outcome per request of a step; None for a block with a known token, and for one whose masks are late."""


BeginMasks = Callable[[dict[str, Any]], Callable[[], Masks] | None]
"""Begins to compute the masks of a step's posted blocks, by request, and returns what waits for them while
the forward runs; None: no block has a grammar."""


def no_masks(posted: dict[str, Any]) -> None:
    """Compute no masks, as before the first step."""


def first_tokens(proposal: Proposal, count: int) -> Proposal:
    return proposal if len(proposal) <= count else proposal.path(range(count))
