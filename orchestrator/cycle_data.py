"""What is asked of a proposal, and what one cycle did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gammaray.types import DrafterKind, FinishReason, TokenOrigin
from orchestrator.verdicts import TokenLogprobs, VerifyTiming
from orchestrator.walk import Level

__all__ = ["Cycle", "Shape"]


@dataclass(frozen=True)
class Shape:
    """What a proposal may look like.

    Args:
        depth: Upper bound of the longest path, in tokens: gamma. 0 is plain decoding.
        max_nodes: Upper bound of nodes; up to `depth` it means a chain, above it a tree may come.
        reason: Why the controller chose it.
        is_fallback: Whether the drafter that the request allows cannot propose.
        stop_threshold: A chain ends before a token that the draft believes is less likely accepted; 0: never.
    """

    depth: int
    max_nodes: int = 0
    reason: str = field(default="", compare=False)
    is_fallback: bool = field(default=False, compare=False)
    stop_threshold: float = field(default=0.0, compare=False)

    def clipped(self, depth: int) -> Shape:
        """Return the shape with at most `depth` levels."""
        return self if self.depth <= depth else replace(self, depth=depth)


@dataclass(frozen=True)
class Cycle:
    """What one cycle did.

    Args:
        gamma: Depth of the proposal that was asked for.
        num_drafted: Nodes of the proposal that was verified; 0 after a failed propose.
        num_tested: Proposed tokens put to the test.
        num_accepted: Proposed tokens that the target agreed with, those behind the cut included.
        token_ids: The emitted tokens, at least one.
        origins: Where each came from.
        logprobs: One per emitted token when asked for, else empty.
        text: Text that became complete.
        finish_reason: Set when this cycle ended the completion.
        draft_s: Seconds waited for the proposal.
        verify_s: Seconds waited for the verdict.
        total_s: Seconds of the whole cycle.
        is_first: Whether it was the session's first cycle, whose waits contain the prefill.
        draft_failed: Whether the drafter failed or was late.
        shape: What was asked for, with the controller's reason; its depth is `gamma`.
        levels: What verification met on its way down the proposal.
        timing: Where the target worker's time went; None when it did not say.
        drafter: Who proposed; NONE when nothing was proposed.
        draft_worker: Address of the draft worker that proposed, "" for none.
        is_fallback: Whether the drafter that the request allows could not propose.
        is_prepared: Whether the proposal was there before it was asked for.
        started: `time.perf_counter()` at its beginning.
    """

    gamma: int
    num_drafted: int
    num_tested: int
    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...]
    text: str
    finish_reason: FinishReason | None
    draft_s: float
    verify_s: float
    total_s: float
    is_first: bool
    draft_failed: bool
    shape: Shape = Shape(0)
    levels: tuple[Level, ...] = ()
    timing: VerifyTiming | None = None
    drafter: DrafterKind = DrafterKind.NONE
    draft_worker: str = ""
    is_fallback: bool = False
    is_prepared: bool = False
    started: float = 0.0
