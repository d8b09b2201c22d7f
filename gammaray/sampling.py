"""The sampling parameters: each field with its default, its range and its meaning, declared once.

Generated from here: a parameter's check, its conversion from and to the field of the same name in
`protos/gammaray/v1/types.proto`, the option of `gammaray generate`, the field of HTTP bodies and its schema
in the OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, get_type_hints

from gammaray.checks import FieldRule, Integer, Number, Text, TokenBiases, TokenIds

MAX_LOGIT_BIAS = 300
"""Upper bound of entries of `logit_bias`, the same as OpenAI's."""

MAX_GRAMMAR = 2**18
"""Upper bound of the characters of a grammar."""


@dataclass(frozen=True)
class SamplingParams:
    """Logits processing before sampling, and the seed. The annotation of a field has its range and meaning.

    Applied in this order: grammar, allow and ban masks, `min_tokens`, logit bias, repetition, frequency and
    presence penalties, temperature, min-p, top-k, top-p.
    """

    temperature: Annotated[float, Number(0, 100, "Divides the logits; 0 is greedy.")] = 1.0
    top_p: Annotated[
        float,
        Number(0, 1, "Keep the smallest set of most likely tokens with this mass; 1 is off.", open_low=True),
    ] = 1.0
    top_k: Annotated[int, Integer(0, 2**31, "Keep this many most likely tokens; 0 is off.")] = 0
    min_p: Annotated[
        float, Number(0, 1, "Drop tokens less likely than this share of the most likely one; 0 is off.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Number(0, 100, "Applies to the tokens of prompt and output; 1 is off.", open_low=True)
    ] = 1.0
    presence_penalty: Annotated[
        float, Number(-2, 2, "Subtracted once from the logits of the output's tokens; 0 is off.")
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Number(-2, 2, "Subtracted from the logits of the output's tokens for each occurrence; 0 is off."),
    ] = 0.0
    logit_bias: Annotated[
        Mapping[int, float], TokenBiases(-100, 100, MAX_LOGIT_BIAS, "Added to the logits, by token id.")
    ] = field(default_factory=dict)
    allowed_token_ids: Annotated[
        tuple[int, ...], TokenIds("If not empty, only these tokens are produced.")
    ] = ()
    banned_token_ids: Annotated[tuple[int, ...], TokenIds("These tokens are never produced.")] = ()
    min_tokens: Annotated[
        int, Integer(0, 2**31, "Mask end-of-sequence tokens until this many tokens were produced.")
    ] = 0
    seed: Annotated[
        int | None,
        Integer(0, 2**64 - 1, "Seed for reproducible tokens; by default the server draws one.", True),
    ] = None
    sample_index: Annotated[
        int, Integer(0, 2**24 - 1, "Index of this sample among several for one prompt and seed.")
    ] = 0
    grammar: Annotated[
        str,
        Text(MAX_GRAMMAR, "Grammar of the completion, in the Lark syntax of llguidance; empty: any text."),
    ] = ""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of values by name; checks only kind and size of collections."""
        copied = dict(values)
        for name, rule in _COLLECTIONS.items():
            if name in copied:
                copied[name] = rule.copied(name, copied[name])
        return cls(**copied)

    def validate(self, vocab_size: int | None = None) -> None:
        """Check every field, and token ids against a given `vocab_size`; errors name the first wrong one."""
        for name, rule in SAMPLING_RULES.items():
            rule.check(name, getattr(self, name), vocab_size)


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments; sequences of any kind are accepted."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    min_tokens: int
    seed: int | None
    sample_index: int
    grammar: str


SAMPLING_TYPES: Mapping[str, Any] = get_type_hints(SamplingParams, include_extras=True)
"""Annotated type of each field of `SamplingParams`, by name."""

SAMPLING_RULES: Mapping[str, FieldRule] = {
    name: annotated.__metadata__[0] for name, annotated in SAMPLING_TYPES.items()
}
"""Rule of each field of `SamplingParams`, by name."""

_COLLECTIONS = {
    name: rule for name, rule in SAMPLING_RULES.items() if isinstance(rule, (TokenBiases, TokenIds))
}
