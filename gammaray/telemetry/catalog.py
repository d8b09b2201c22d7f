"""All metrics: name, unit, labels and meaning; docs/metrics.md is made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

_FAST_S = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.006, 0.008)
TOKEN_S = (*_FAST_S, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Buckets for times per token and per cycle, in seconds: fine below 10 ms, where most values are."""

REQUEST_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GAMMAS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

_SUFFIXES = {"s": "seconds", "By": "bytes"}


class Kind(str, Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Role(str, Enum):
    ORCHESTRATOR = "orchestrator"
    DRAFT = "draft"
    TARGET = "target"


ALL = tuple(Role)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    unit: str  # in UCUM, as in OpenTelemetry: s, By, or the counted thing in braces
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram's
    roles: tuple[Role, ...] = (Role.ORCHESTRATOR,)  # kinds of the processes that have it

    @property
    def family(self) -> str:
        """Prometheus name, without the `_total` of counters."""
        base = self.name.replace(".", "_")
        suffix = _SUFFIXES.get(self.unit)
        return f"{base}_{suffix}" if suffix else base

    @property
    def samples(self) -> tuple[str, ...]:
        """Names of the Prometheus samples."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.family}_{part}" for part in ("bucket", "count", "sum"))
        return (f"{self.family}_total",) if self.kind is Kind.COUNTER else (self.family,)


_ENGINE = (
    Metric("gammaray.worker.queue_depth", Kind.GAUGE, "{block}", "Blocks waiting or running."),
    Metric("gammaray.worker.cache.used", Kind.GAUGE, "By", "KV cache in use."),
    Metric("gammaray.worker.cache.budget", Kind.GAUGE, "By", "Upper bound of the KV cache."),
    Metric(
        *("gammaray.worker.cache.retained", Kind.GAUGE, "By"),
        "KV cache of ended sessions, in addition to the cache in use: kept for prompts with the same "
        "prefix until the memory is needed.",
    ),
    Metric(
        *("gammaray.worker.prefix_cache.queries", Kind.COUNTER, "{token}"),
        "Tokens that sessions began with on this worker.",
    ),
    Metric(
        *("gammaray.worker.prefix_cache.hits", Kind.COUNTER, "{token}"),
        "Those of them that were cached: by an earlier turn, or by another session with the same prefix.",
    ),
    Metric(
        *("gammaray.worker.drafter.first_tokens", Kind.COUNTER, "{token}"),
        "First tokens of the proposals of a head that learns, by the version that drafted (arm: stable or "
        "candidate), and whether they were accepted or rejected (outcome).",
        labels=("arm", "outcome"),
    ),
    Metric(
        *("gammaray.worker.cache.evictions", Kind.COUNTER, "{session}"),
        "Sessions whose cache was evicted; their tokens are sent again.",
    ),
    Metric(
        *("gammaray.worker.step.duration", Kind.HISTOGRAM, "s"),
        "Time of one step (forward and what follows from it) over blocks.",
        buckets=TOKEN_S,
    ),
    Metric(
        *("gammaray.worker.step.blocks", Kind.HISTOGRAM, "{block}"),
        "Blocks (sessions) per step: the batch size.",
        buckets=SIZES,
    ),
)

GROUPS = {
    "Speculation": (
        Metric(
            *("gammaray.spec_decode.num_tested_tokens", Kind.COUNTER, "{token}"),
            "Tested proposed tokens: the accepted ones, plus one if a test failed.",
        ),
        Metric(
            *("gammaray.spec_decode.num_accepted_tokens", Kind.COUNTER, "{token}"),
            "Proposed tokens that were accepted and emitted.",
        ),
        Metric(
            *("gammaray.tokens", Kind.COUNTER, "{token}"),
            "Tokens emitted, by origin: accepted, correction or bonus.",
            labels=("origin",),
        ),
        Metric(
            *("gammaray.cycles", Kind.COUNTER, "{cycle}"),
            "Cycles by the drafter that proposed: model, head, suffix, prediction, grammar, or none.",
            labels=("rung",),
        ),
        Metric(
            *("gammaray.cycle.fallbacks", Kind.COUNTER, "{cycle}"),
            "Cycles in which the drafter that the request allows was absent, failed or was late.",
        ),
        Metric(
            *("gammaray.cycle.gamma", Kind.HISTOGRAM, "{token}"),
            "Gamma that the controller chose, per cycle.",
            buckets=GAMMAS,
        ),
    ),
    "Where the time goes": (
        Metric(
            *("gammaray.cycle.time", Kind.COUNTER, "s"),
            "Time of all cycles by phase: draft (waiting for proposals), target_queue and target_step (what "
            "the target worker reports), target_wire (the rest of that wait: network and messages), other.",
            labels=("part",),
        ),
        Metric(
            *("gammaray.decode.time", Kind.COUNTER, "s"),
            "Time of the cycles that are compared with plain decoding: all but each completion's first.",
        ),
        Metric(
            *("gammaray.decode.plain_time", Kind.COUNTER, "s"),
            "Time that the tokens of those cycles would have taken one by one, by the measured cost of plain "
            "cycles.",
        ),
    ),
    "Requests": (
        Metric(
            *("gammaray.requests", Kind.COUNTER, "{request}"),
            "Requests ended, by outcome: stop, length, cancelled, or the name of the gRPC status of the "
            "error.",
            labels=("outcome",),
        ),
        Metric("gammaray.requests.active", Kind.GAUGE, "{request}", "Requests in flight."),
        Metric("gammaray.requests.waiting", Kind.GAUGE, "{request}", "Waiting requests."),
        Metric("gammaray.prompt.tokens", Kind.COUNTER, "{token}", "Tokens of prompts."),
        Metric(
            *("gammaray.request.duration", Kind.HISTOGRAM, "s"),
            "Time of a completion, from the request's arrival to its last chunk.",
            buckets=REQUEST_S,
        ),
        Metric(
            *("gammaray.time_to_first_token", Kind.HISTOGRAM, "s"),
            "Time from a request's arrival to its first chunk.",
            buckets=REQUEST_S,
        ),
        Metric(
            *("gammaray.time_per_output_token", Kind.HISTOGRAM, "s"),
            "Time from the first to the last chunk over the number of tokens after the first chunk, per "
            "completion.",
            buckets=TOKEN_S,
        ),
        Metric(
            *("gammaray.inter_token_latency", Kind.HISTOGRAM, "s"),
            "Gap between two chunks of a completion, of one or more tokens each (vLLM's definition).",
            buckets=TOKEN_S,
        ),
    ),
    "Orchestrator and its workers": (
        Metric(
            *("gammaray.workers", Kind.GAUGE, "{worker}"),
            "Workers that the orchestrator is connected to, by role.",
            labels=("role",),
        ),
    ),
    "Workers": tuple(
        replace(own, roles=(Role.DRAFT, Role.TARGET), labels=("role", *own.labels)) for own in _ENGINE
    ),
    "Every process": (
        Metric(
            *("gammaray.info", Kind.GAUGE, "1"),
            "Always 1; the labels describe the process. `kernel` is what computes a worker's model.",
            labels=("role", "model", "version", "kernel"),
            roles=ALL,
        ),
        Metric(
            *("gammaray.tasks", Kind.GAUGE, "{task}"),
            "asyncio tasks that are not done: some of the process's own, and some per request and stream.",
            labels=("role",),
            roles=ALL,
        ),
    ),
}
"""The metrics by subject."""

CATALOG = tuple(metric for group in GROUPS.values() for metric in group)
BY_NAME = {metric.name: metric for metric in CATALOG}
