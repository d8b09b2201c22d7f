"""Conversion of the fields that both worker protocols share, to tasks and from replies."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gammaray import __version__
from gammaray.blocks import OLDEST_PROTOCOL, PROTOCOL
from gammaray.errors import GammarayError
from gammaray.v1 import types_pb2
from gammaray.wire.convert import sampling_from_proto
from gammaray.wire.enums import method_from_proto
from services.scheduling.scheduler import Scheduler
from services.scheduling.tasks import NeedTokens, Reply, SessionSpec, Timing
from services.streaming.engine_thread import EngineThread
from services.streaming.streams import Deliver
from services.streaming.tracing import sampled_parent

_MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True)
class Model:
    name: str
    vocab_size: int
    max_context: int
    vocab_sha256: str  # fingerprint of the tokenizer's vocabulary; empty without a tokenizer
    metrics_address: str = ""  # host:port of the Prometheus endpoint; empty: none
    kernel: str = ""  # implementation of its forwards, see `Engine.kernel`
    identity: str = ""  # of a target's weights and arithmetic, see `model_identity`; empty: unknown
    takes_trees: bool = True  # whether a target verifies trees
    forward_s: Sequence[float] = ()  # of a target's forwards over 1, 2, 4, 8, ... tokens; empty: not measured
    adapters: Mapping[str, str] = field(default_factory=dict)  # a target's identity with each LoRA adapter


def task_fields(block: Any, default_timeout_ms: int, deliver: Deliver) -> dict[str, Any]:
    """Return the fields that a VerifyBlock or ProposeBlock shares with any task."""
    now = time.monotonic()
    return {
        "request_id": block.request_id,
        "session_id": block.session_id,
        "epoch": block.epoch,
        "base_position": block.base_position,
        "context_start": block.context.start,
        "context": list(block.context.token_ids),
        "spec": _spec(block.spec) if block.HasField("spec") else None,
        "deadline": now + (block.timeout_ms or default_timeout_ms) / 1000,
        "deliver": deliver,
        "arrived": now,
        "traceparent": sampled_parent(block.trace.traceparent) if block.HasField("trace") else "",
    }


def _spec(message: types_pb2.SessionSpec) -> SessionSpec:
    return SessionSpec(
        params=sampling_from_proto(message.sampling),
        method=method_from_proto(message.verification),
        prompt_length=message.prompt_length,
        eos_token_ids=tuple(message.eos_token_ids),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        adapter=message.adapter,
        no_learning=message.no_learning,
    )


def fill_result(result: Any, reply: Reply) -> None:
    """Write the fields that VerifyResult and ProposeResult share: ids, need, error and timing."""
    result.request_id = reply.request_id
    result.session_id = reply.session_id
    outcome = reply.outcome
    if isinstance(outcome, NeedTokens):
        # A position of 0 is the default and not encoded: mark the message as present.
        result.need.SetInParent()
        result.need.position = outcome.position
    elif isinstance(outcome, GammarayError):
        fill_error(result.error, outcome)
    fill_timing(result.timing, reply.timing)


def fill_error(message: types_pb2.BlockError, error: GammarayError) -> None:
    """Write an error into an empty message."""
    message.code = error.status.value[0]
    message.message = str(error)


def fill_timing(message: types_pb2.WorkerTiming, timing: Timing) -> None:
    """Write a timing into an empty message."""
    message.queue_us = min(timing.queue_us, _MAX_UINT32)
    message.compute_us = min(timing.compute_us, _MAX_UINT32)
    message.forward_us = min(timing.forward_us, _MAX_UINT32)
    message.batch_size = timing.batch_size
    message.batch_tokens, message.batch_rows = timing.batch_tokens, timing.batch_rows
    message.cached_tokens = timing.cached_tokens


async def describe(model: Model, engine: EngineThread) -> dict[str, Any]:
    """Return the fields that GetDraftInfoResponse and GetTargetInfoResponse share.

    The answer comes between two steps: an orchestrator leaves a worker that does not give it for some
    seconds. A scheduler that bounds the time of its steps answers during a step, too, since the worker itself
    leaves when one takes longer.
    """

    def measure(scheduler: Scheduler[Any]) -> dict[str, Any]:
        queue, stats = scheduler.queue, scheduler.queue.stats()
        return {
            "protocol": PROTOCOL,
            "oldest_protocol": OLDEST_PROTOCOL,
            "num_sessions": stats.num_sessions,
            "num_queued": queue.num_queued,
            "cache_bytes": stats.cache_bytes,
            "cache_budget_bytes": stats.cache_budget_bytes,
            "totals": types_pb2.WorkerTotals(**vars(queue.meter.totals)),
        }

    scheduler = engine.scheduler
    has_bound = scheduler is not None and scheduler.step_timeout_s is not None
    return {
        "model": model.name,
        "vocab_size": model.vocab_size,
        "max_context": model.max_context,
        "pid": os.getpid(),
        "vocab_sha256": model.vocab_sha256,
        "metrics_address": model.metrics_address,
        "kernel": model.kernel,
        "version": __version__,
        **(engine.look(measure) if has_bound else await engine.call(measure)),
        "clock_s": time.time(),
    }
