"""Values of the block protocol, which orchestrator and workers share: shapes of proposals, and verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gammaray.types import DrafterKind, PromptLogprobs, Proposal, TokenOrigin

__all__ = [
    "MAX_ANSWER_BYTES",
    "Shape",
    "TokenLogprobs",
    "Verdict",
    "VerifyTiming",
]

PROTOCOL, OLDEST_PROTOCOL = 1, 0
"""Newest and oldest version of the workers' protocol that this version speaks. A change that the other side
of an upgrade would misunderstand gets a new number; the oldest one follows when its support ends."""

MAX_ANSWER_BYTES = 64 << 20
"""Largest frame that a worker writes and an orchestrator reads; a larger one closes the connection."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Bounds of a proposal.

    Args:
        depth: Upper bound of the longest path, in tokens: gamma. 0 is plain decoding.
        max_nodes: Upper bound of nodes; up to `depth` the proposal is a chain, above it may be a tree.
        reason: Why the controller chose it. This and the following fields are not on the wire.
        is_fallback: Whether the drafter that the request allows cannot propose.
        drafter: Kind of the drafter that proposes.
    """

    depth: int
    max_nodes: int = 0
    reason: str = field(default="", compare=False)
    is_fallback: bool = field(default=False, compare=False)
    drafter: DrafterKind = field(default=DrafterKind.MODEL, compare=False)

    @property
    def is_tree(self) -> bool:
        """Whether a proposal of this shape may be a tree."""
        return self.max_nodes > self.depth

    @property
    def chain(self) -> Shape:
        """The shape without trees."""
        return replace(self, max_nodes=0) if self.is_tree else self

    def clipped(self, depth: int) -> Shape:
        """Return the shape with at most `depth` levels."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position under the model's own distribution, unprocessed.

    Args:
        logprob: Log-probability of the emitted token.
        top: The most likely tokens and their log-probabilities, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyTiming:
    """Timing that the target worker reports for the step that served a block.

    Args:
        queue_s: Seconds between the block's arrival and the start of the step.
        compute_s: Seconds of the step; the same for all sessions of the batch.
        batch_size: Sessions in the batch.
        batch_tokens: Tokens fed, over the whole batch.
        batch_rows: Of these, those with logits: proposed tokens, and the last committed one of each session.
    """

    queue_s: float
    compute_s: float
    batch_size: int
    batch_tokens: int
    batch_rows: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which proposed tokens are accepted, and the target's next token.

    Args:
        accepted_path: Indexes of the accepted nodes, from the root down; for a chain 0, 1, ... .
        next_token_id: The target's token after them: correction or bonus.
        next_origin: Whether it is a correction or a bonus token.
        num_tested: Proposed tokens that were tested: the accepted ones, plus one when a test failed.
        logprobs: One per emitted token if requested, else empty.
        prompt_logprobs: Those of the prompt, if requested from the target worker. None in the orchestrator,
            which may convert them in a thread.
        timing: Timing of the worker's step, set by the orchestrator; None if the worker did not report any.
        drafted: The proposal of the worker's head that was verified, without distributions; None if the head
            was not asked for one.
    """

    accepted_path: tuple[int, ...]
    next_token_id: int
    next_origin: TokenOrigin
    num_tested: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    timing: VerifyTiming | None = None
    drafted: Proposal | None = None
