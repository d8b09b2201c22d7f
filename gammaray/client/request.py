"""Generation requests from plain Python arguments: the options shared by all clients and the CLI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, Literal, TypeVar, Unpack

from gammaray.checks import TokenIds
from gammaray.client.structured import OutputForm, OutputOptions
from gammaray.errors import InvalidArgumentError, renaming
from gammaray.sampling import SAMPLING_RULES, SamplingOptions
from gammaray.types import (
    ADAPTIVE,
    MAX_GAMMA,
    MAX_STOP_TOKEN_IDS,
    DrafterKind,
    GammaPolicy,
    GenerationRequest,
    SamplingParams,
    VerificationMethod,
)

Prompt = str | Sequence[int] | GenerationRequest
"""Text, token ids of the target's vocabulary, or a whole request."""

_Choice = TypeVar("_Choice", bound=Enum)

_FORMS = frozenset(OutputOptions.__annotations__)


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate` and `complete`; missing ones take the default of the field they set.

    The sampling options are the fields of `SamplingParams`, the others those of `GenerationRequest`, except:

        gamma: "adaptive" (default), a fixed draft length in [0, 64] (0 is plain decoding), or a GammaPolicy.
        stop: One string or several.
        logprobs: Number of alternatives with log-probabilities, in [0, 20]; None: no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        verification, drafter: The enum member or its value.
        prediction: What the completion is expected to resemble, text or token ids; it affects speed only.
        store: False stores no session; the completion then cannot be resumed when its call breaks.
        receipt: True asks for a signed receipt, in `receipt` of the last chunk and of the completion.
        json_schema, regex, choice, grammar: The form of the completion, see
            `gammaray.client.structured.OutputOptions`; at most one.
    """

    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    verification: VerificationMethod | Literal["coupled", "rejection", "naive", "block"]
    gamma: GammaPolicy | Literal["adaptive"] | int
    drafter: DrafterKind | Literal["model", "head", "suffix", "prediction", "grammar", "none"]
    session_id: str
    turn: int
    cache_salt: str
    prediction: str | Sequence[int]
    store: bool
    receipt: bool
    model: str
    json_schema: Mapping[str, Any] | bool | type[Any] | None
    regex: str | None
    choice: Sequence[str] | None


def build_request(prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationRequest:
    """Return the validated request for a prompt and options, see `build_with_form`."""
    return build_with_form(prompt, options)[0]


def build_with_form(prompt: Prompt, options: GenerateOptions) -> tuple[GenerationRequest, OutputForm]:
    """Return the validated request for a prompt and options, and the form of its completion.

    InvalidArgumentError names the first invalid field, its value and what is allowed; TypeError an unknown
    option, or options given together with a GenerationRequest.
    """
    if isinstance(prompt, GenerationRequest):
        if options:
            raise TypeError(f"{', '.join(options)}: set these in the GenerationRequest itself")
        prompt.validate()
        return prompt, OutputForm()
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        known = ", ".join(sorted(GenerateOptions.__annotations__))
        raise TypeError(f"no option named {', '.join(sorted(unknown))}; known options: {known}")
    form = OutputForm.of(options)
    given: dict[str, Any] = {name: value for name, value in options.items() if name not in _FORMS}
    given["grammar"] = form.grammar
    if "logprobs" in given:
        given["num_top_logprobs"] = given.pop("logprobs")
    if "prompt_logprobs" in given:
        given["num_prompt_logprobs"] = given.pop("prompt_logprobs")
    for name, convert in _CONVERTERS.items():
        if name in given:
            given[name] = convert(name, given[name])
    sampling = SamplingParams.of({name: given.pop(name) for name in SAMPLING_RULES.keys() & given.keys()})
    request = GenerationRequest(prompt=_text_or_ids("prompt", prompt), sampling=sampling, **given)
    with renaming(grammar=form.name):
        request.validate()
    return request, form


def _text_or_ids(name: str, value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return tuple(value)
    raise InvalidArgumentError(name, f"a {type(value).__name__}", "text or a sequence of token ids")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise InvalidArgumentError(name, value, "a string or a sequence of strings")


def _gamma(name: str, value: object) -> GammaPolicy:
    if isinstance(value, GammaPolicy):
        return value
    if value == "adaptive":
        return ADAPTIVE
    if isinstance(value, int) and not isinstance(value, bool):
        return GammaPolicy(fixed=value)
    raise InvalidArgumentError(name, value, f'"adaptive" or an integer in [0, {MAX_GAMMA}]')


def _instance(kind: type, allowed: str, name: str, value: object) -> object:
    if isinstance(value, kind):
        return value
    raise InvalidArgumentError(name, value, allowed)


def _choice(cls: type[_Choice], name: str, value: object) -> _Choice:
    try:
        return cls(value)
    except ValueError:
        allowed = ", ".join(member.value for member in cls)
        raise InvalidArgumentError(name, value, f"one of {allowed}") from None


_text, _flag = partial(_instance, str, "a string"), partial(_instance, bool, "True or False")
_CONVERTERS: dict[str, Any] = {
    "stop": _strings,
    "stop_token_ids": TokenIds(max_ids=MAX_STOP_TOKEN_IDS).copied,
    "gamma": _gamma,
    "ignore_eos": _flag,
    "store": _flag,
    "receipt": _flag,
    "session_id": _text,
    "model": _text,
    "cache_salt": _text,
    "prediction": _text_or_ids,
    "verification": lambda name, value: _choice(VerificationMethod, name, value),
    "drafter": lambda name, value: _choice(DrafterKind, name, value),
}
