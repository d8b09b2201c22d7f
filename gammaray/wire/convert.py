"""Conversion between wire messages and the types of `gammaray.types`, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from gammaray import types as t
from gammaray.checks import TokenIds
from gammaray.errors import InvalidArgumentError
from gammaray.types import ProcessStatus, SamplingParams, WorkerTotals
from gammaray.v1 import generation_service_pb2 as gen
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.blocks import fill_prompt_logprobs, prompt_logprobs_from_proto
from gammaray.wire.enums import (
    DRAFTERS,
    DRAFTERS_BACK,
    FINISH_REASONS,
    FINISH_REASONS_BACK,
    METHODS,
    ORIGINS,
    method_from_proto,
    origin_from_proto,
)

_TOKEN_IDS = TokenIds()  # refuses more than a request may have before any is copied

# Fields whose dataclasses have the fields of their messages.
_NESTED: dict[str, type[Any]] = {
    "worker_totals": WorkerTotals,
    "speculation_totals": t.SpeculationTotals,
    "usage": t.Usage,
    "summary": t.SpeculationSummary,
}


def process_to_proto(process: ProcessStatus) -> gen.ProcessStatus:
    return gen.ProcessStatus(**_fields(process))


def process_from_proto(message: gen.ProcessStatus) -> ProcessStatus:
    return ProcessStatus(**values_of(message, ProcessStatus))


def values_of(message: Message, kind: type[Any]) -> dict[str, Any]:
    """Return the values of a dataclass's fields that a message has under the same names; None: missing."""
    values = {}
    for name in kind.__dataclass_fields__.keys() & message.DESCRIPTOR.fields_by_name.keys():
        value = getattr(message, name)
        if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
            value = None
        elif name in _NESTED:
            value = _NESTED[name](**values_of(value, _NESTED[name]))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            value = tuple(value)
        values[name] = value
    return values


def _fields(value: ProcessStatus | t.Chunk) -> dict[str, Any]:
    """Return what a message is made of, under the same names."""
    return {name: vars(own) if own and name in _NESTED else own for name, own in vars(value).items()}


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(**vars(params))


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a wire message; missing fields take their defaults."""
    return SamplingParams.of({field.name: value for field, value in message.ListFields()})


def request_to_proto(request: t.GenerationRequest) -> gen.GenerateRequest:
    fields = vars(request) | {
        "sampling": sampling_to_proto(request.sampling),
        "verification": METHODS[request.verification],
        "gamma": gen.GammaPolicy(max_gamma=request.gamma.max_gamma, max_nodes=request.gamma.max_nodes),
        "drafter": DRAFTERS[request.drafter],
        "store": None if request.store else False,
    }
    del fields["prompt"], fields["prediction"]
    message = gen.GenerateRequest(**fields)
    if request.gamma.fixed is None:
        message.gamma.adaptive = True
    else:
        message.gamma.fixed = request.gamma.fixed
    if isinstance(request.prompt, str):
        message.text = request.prompt
    elif request.prompt:
        message.token_ids.ids.extend(request.prompt)
    if isinstance(request.prediction, str) and request.prediction:
        message.prediction.text = request.prediction
    elif request.prediction:
        message.prediction.token_ids.ids.extend(request.prediction)
    return message


def request_from_proto(message: gen.GenerateRequest) -> t.GenerationRequest:
    """Return the generation request of a wire message, validated as far as possible without the model."""
    prompt: str | tuple[int, ...]
    prompt = message.text
    if message.WhichOneof("prompt") == "token_ids":
        prompt = _TOKEN_IDS.copied("prompt", message.token_ids.ids)
    prediction: str | tuple[int, ...] = message.prediction.text
    if message.prediction.WhichOneof("content") == "token_ids":
        prediction = _TOKEN_IDS.copied("prediction", message.prediction.token_ids.ids)
    if message.drafter not in (pb.DRAFTER_KIND_UNSPECIFIED, *DRAFTERS_BACK):
        raise InvalidArgumentError("drafter", message.drafter, f"one of {sorted(DRAFTERS_BACK)}")
    stop_token_ids = _TOKEN_IDS.copied("stop_token_ids", message.stop_token_ids)
    fixed = message.gamma.fixed if message.gamma.WhichOneof("policy") == "fixed" else None
    values = values_of(message, t.GenerationRequest) | {
        "prompt": prompt,
        "sampling": sampling_from_proto(message.sampling),
        "verification": method_from_proto(message.verification),
        "gamma": t.GammaPolicy(fixed, message.gamma.max_gamma, message.gamma.max_nodes),
        "drafter": DRAFTERS_BACK.get(message.drafter, t.DrafterKind.MODEL),
        "prediction": prediction,
        "stop_token_ids": stop_token_ids,
    }
    request = t.GenerationRequest(**{name: value for name, value in values.items() if value is not None})
    request.validate()
    return request


def chunk_to_proto(chunk: t.Chunk) -> gen.GenerateResponse:
    fields = _fields(chunk) | {
        "tokens": map(token_to_proto, chunk.tokens),
        "finish_reason": None if chunk.finish_reason is None else FINISH_REASONS[chunk.finish_reason],
        "prompt_logprobs": None,
    }
    message = gen.GenerateResponse(**fields)
    if chunk.prompt_logprobs is not None:
        fill_prompt_logprobs(message.prompt_logprobs, chunk.prompt_logprobs)
    return message


def chunk_from_proto(message: gen.GenerateResponse) -> t.Chunk:
    logprobs = message.prompt_logprobs
    values = values_of(message, t.Chunk) | {
        "tokens": tuple(token_from_proto(token) for token in message.tokens),
        "finish_reason": FINISH_REASONS_BACK.get(message.finish_reason),
    }
    if message.HasField("prompt_logprobs"):
        values["prompt_logprobs"] = prompt_logprobs_from_proto(logprobs, tuple(logprobs.token_ids))
    return t.Chunk(**values)


def token_to_proto(token: t.EmittedToken) -> gen.EmittedToken:
    return gen.EmittedToken(
        token_id=token.token_id,
        origin=ORIGINS[token.origin],
        logprob=token.logprob,
        top_logprobs=[gen.TopLogprob(**vars(top)) for top in token.top_logprobs],
        token_bytes=token.token_bytes,
        drafter=pb.DRAFTER_KIND_UNSPECIFIED if token.drafter is None else DRAFTERS[token.drafter],
    )


def token_from_proto(message: gen.EmittedToken) -> t.EmittedToken:
    return t.EmittedToken(
        token_id=message.token_id,
        origin=origin_from_proto(message.origin),
        token_bytes=message.token_bytes,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(t.TopLogprob(p.token_id, p.logprob, p.token_bytes) for p in message.top_logprobs),
        drafter=DRAFTERS_BACK.get(message.drafter),  # None also for a kind that a later version added
    )
