"""What the target says of a proposal."""

from __future__ import annotations

from dataclasses import dataclass

from gammaray.types import TokenOrigin

__all__ = ["TokenLogprobs", "Verdict", "VerifyTiming"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (natural log) at one position.

    Args:
        logprob: Of the emitted token.
        top: The most likely tokens and their log-probabilities, most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class VerifyTiming:
    """What the target worker says of the step that served a block.

    Args:
        queue_s: Seconds between the block's arrival and the step.
        compute_s: Seconds of the step, which the sessions of the batch share.
        batch_size: Sessions in the batch.
        batch_tokens: Tokens fed, over the whole batch.
    """

    queue_s: float
    compute_s: float
    batch_size: int
    batch_tokens: int


@dataclass(frozen=True)
class Verdict:
    """Which proposed tokens stand, and what the target says next.

    Args:
        accepted_path: Indexes of the accepted nodes, from the root down; for a chain 0, 1, ... .
        next_token_id: The target's token after them: correction or bonus.
        next_origin: Which of the two.
        num_tested: Proposed tokens put to the test.
        logprobs: One per emitted token when asked for, else empty.
        timing: Where the worker's time went; None when it did not say.
    """

    accepted_path: tuple[int, ...]
    next_token_id: int
    next_origin: TokenOrigin
    num_tested: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: VerifyTiming | None = None
