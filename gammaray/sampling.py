"""What turns logits into the distribution that is sampled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gammaray.checks import check_int, check_number, check_token_ids
from gammaray.errors import InvalidArgumentError

__all__ = ["MAX_LOGIT_BIAS", "SamplingParams"]

MAX_LOGIT_BIAS = 300
"""Entries of `logit_bias`, as many as OpenAI takes."""


@dataclass(frozen=True)
class SamplingParams:
    """What turns logits into the distribution that is sampled from.

    Applied in this order: allow and ban masks, `min_tokens`, logit bias, repetition, frequency and presence
    penalties, temperature, min-p, top-k, top-p.

    Args:
        temperature: Divides the logits; 0 is greedy. In [0, 100].
        top_p: Keep the smallest set of most likely tokens with this mass. In (0, 1]; 1 is off.
        top_k: Keep this many most likely tokens; 0 is off.
        min_p: Drop tokens less likely than this share of the most likely one. In [0, 1]; 0 is off.
        repetition_penalty: Over prompt and output. In (0, 100]; 1 is off.
        presence_penalty: Over the output. In [-2, 2]; 0 is off.
        frequency_penalty: Over the output. In [-2, 2]; 0 is off.
        logit_bias: Added to logits by token id. Each in [-100, 100]; at most 300 entries.
        allowed_token_ids: When not empty, only these tokens are produced.
        banned_token_ids: These tokens are never produced.
        min_tokens: End-of-sequence tokens are masked until this many tokens were produced.
        seed: Key of the counter-based generator, in [0, 2^64); None lets the server draw one.
        sample_index: Which of several samples for one prompt and seed this is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    sample_index: int = 0

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every field, and token ids against `vocab_size` when it is given.

        Raises:
            InvalidArgumentError: Names the first wrong field, what was got and what is allowed.
        """
        check_number("temperature", self.temperature, 0, 100)
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_int("top_k", self.top_k, 0, 2**31)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        check_number("presence_penalty", self.presence_penalty, -2, 2)
        check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        check_int("min_tokens", self.min_tokens, 0, 2**31)
        check_int("sample_index", self.sample_index, 0, 2**24 - 1)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            got = f"{len(self.logit_bias)} entries"
            raise InvalidArgumentError("logit_bias", got, f"at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias.items():
            check_number(f"logit_bias[{token_id}]", bias, -100, 100)
        check_token_ids("logit_bias", tuple(self.logit_bias), vocab_size)
        for name in ("allowed_token_ids", "banned_token_ids"):
            token_ids = getattr(self, name)
            check_token_ids(name, token_ids, vocab_size)
            if vocab_size is not None and len(token_ids) > vocab_size:  # every cycle would pay for them
                allowed = f"at most {vocab_size}, the size of the vocabulary"
                raise InvalidArgumentError(name, f"{len(token_ids)} token ids", allowed)
