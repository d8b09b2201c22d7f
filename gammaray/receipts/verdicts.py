"""What the check of a receipt finds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ReceiptVerdict(BaseModel):
    """What the check of a receipt found.

    Attributes:
        result: valid: every token follows from checkpoint, prompt, parameters and seed; invalid: one does
            not; refused: this cannot be checked here.
        reason: Why it is invalid or refused; else empty.
        num_tokens: Emitted tokens that were checked.
        num_ties: Of these, how many are the argmax only after a change of logits within the margin.
        largest_gap: The largest `gap` of these.
        margin: How far two logits may move towards each other to make a token the argmax.
        position: Index of the first wrong token among the emitted ones.
        token: That token.
        expected: The token in its place.
        gap: How far its score log p + noise is above that of `token`, times the temperature: nats of a logit.
            None: `token` cannot be drawn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    result: Literal["valid", "invalid", "refused"]
    reason: str = ""
    num_tokens: int = 0
    num_ties: int = 0
    largest_gap: float = 0.0
    margin: float = 0.0
    position: int | None = None
    token: int | None = None
    expected: int | None = None
    gap: float | None = None
