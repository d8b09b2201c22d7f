"""Values of the block protocol, which orchestrator and workers share: shapes of proposals, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gammaray.types import DrafterKind, PromptLogprobs, Proposal, TokenOrigin

PROTOCOL, OLDEST_PROTOCOL = 2, 0
"""Newest and oldest version of the workers' protocol that this version speaks. A change that the other side
of an upgrade would misunderstand gets a new number; the oldest one follows when its support ends."""

MAX_ANSWER_BYTES = 64 << 20
"""Largest frame that a worker writes and an orchestrator reads; a larger one closes the connection."""

MAX_AHEAD = 128
"""Tokens that a worker decodes ahead after a block. After the last of them the session leaves out a step or
two. A turn that ends before, as at a stop string, releases its session."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of a proposal."""

    depth: int  # upper bound of the longest path, in tokens: gamma. 0 is plain decoding
    max_nodes: int = 0  # upper bound of nodes; up to `depth` the proposal is a chain, above it may be a tree
    # Depth up to which a chain is drafted on request, 0: all; what is deeper is proposed if it was prepared.
    drafted_depth: int = 0
    reason: str = field(default="", compare=False)  # the controller's; this and the rest are not on the wire
    is_fallback: bool = field(default=False, compare=False)  # the allowed drafter cannot propose
    drafter: DrafterKind = field(default=DrafterKind.MODEL, compare=False)  # kind that proposes

    @property
    def is_tree(self) -> bool:
        """Whether a proposal of this shape may be a tree."""
        return self.max_nodes > self.depth

    @property
    def chain(self) -> Shape:
        """The shape without trees."""
        return replace(self, max_nodes=0) if self.is_tree else self

    @property
    def whole(self) -> Shape:
        """The shape of which all is drafted."""
        return replace(self, drafted_depth=0) if self.drafted_depth else self

    def clipped(self, depth: int) -> Shape:
        """Return the shape with at most `depth` levels."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position under the model's own distribution, unprocessed."""

    logprob: float  # of the emitted token
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens and theirs, most likely first


@dataclass(frozen=True, slots=True)
class VerifyTiming:
    """Timing that the target worker reports for the step that served a block."""

    queue_s: float  # seconds between the block's arrival and the start of the step
    compute_s: float  # of the step, the same for all sessions of the batch
    batch_size: int  # sessions in the batch
    batch_tokens: int  # tokens fed, over the whole batch
    batch_rows: int  # those with logits: proposed tokens, and the last committed one of each session


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which proposed tokens are accepted, and the target's next token."""

    accepted_path: tuple[int, ...]  # indexes of the accepted nodes, from the root down; of a chain 0, 1, ...
    next_token_id: int  # correction or bonus
    next_origin: TokenOrigin  # which of these
    num_tested: int  # proposed tokens that were tested: the accepted ones, plus one when a test failed
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per emitted token if requested, else empty
    # Tokens after the next one, which the target worker decoded ahead; their logprobs come last.
    further_token_ids: tuple[int, ...] = ()
    is_followed: bool = False  # whether the target worker decodes ahead now
    # Seconds per token that was decoded ahead, 0 if unknown; None: a block asked for the token.
    ahead_s: float | None = None
    # If requested from the target worker. None in the orchestrator, which may convert them in a thread.
    prompt_logprobs: PromptLogprobs | None = None
    timing: VerifyTiming | None = None  # set by the orchestrator; None if the worker reported none
    drafted: Proposal | None = None  # by the worker's head, without distributions; None if not asked
