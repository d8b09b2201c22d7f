"""Metrics of an orchestrator: cycles, requests and their latencies. They cost some microseconds per cycle."""

from __future__ import annotations

import asyncio
import logging
import time

from gammaray.errors import GammarayError
from gammaray.telemetry.meter import Counter, Meter
from gammaray.types import Chunk, DrafterKind, FinishReason, GenerationRequest, SpeculationTotals, TokenOrigin
from orchestrator.access.admission import Admission
from orchestrator.cycle.types import Cycle
from orchestrator.workers.fleet import Fleet

_access_log = logging.getLogger("ray.serve")  # Ray writes this logger to a replica's log
_PARTS = ("draft", "target_queue", "target_step", "target_wire", "other")
_GOOD = tuple(reason.value for reason in FinishReason)

# Prometheus treats the first value of a series as its start, so these series are created at zero.
_OUTCOMES = sorted({*_GOOD, *(error.status.name.lower() for error in GammarayError.__subclasses__())})


class OrchestratorMeter:
    def __init__(self) -> None:
        self.meter = meter = Meter()
        self._num_drafts = self._num_drafted = 0
        self._positions: list[int] = []
        self.tested = meter.counter("gammaray.spec_decode.num_tested_tokens")
        self.accepted = meter.counter("gammaray.spec_decode.num_accepted_tokens")
        self.tokens = {kind: meter.counter("gammaray.tokens", origin=kind.value) for kind in TokenOrigin}
        self.cycles = {kind: meter.counter("gammaray.cycles", rung=kind.value) for kind in DrafterKind}
        self.fallbacks = meter.counter("gammaray.cycle.fallbacks")
        self.gamma = meter.histogram("gammaray.cycle.gamma")
        self.parts = tuple(meter.counter("gammaray.cycle.time", part=part) for part in _PARTS)
        self.decode_s = meter.counter("gammaray.decode.time")
        self.plain_s = meter.counter("gammaray.decode.plain_time")
        self.prompt_tokens = meter.counter("gammaray.prompt.tokens")
        self.request_s = meter.histogram("gammaray.request.duration")
        self.first_token_s = meter.histogram("gammaray.time_to_first_token")
        self.per_token_s = meter.histogram("gammaray.time_per_output_token")
        self.between_s = meter.histogram("gammaray.inter_token_latency")
        self._outcomes: dict[str, Counter] = {}
        for outcome in _OUTCOMES:
            self.outcome(outcome)

    def watch(self, admission: Admission, fleet: Fleet) -> None:
        """Register gauges that read admission and workers on each scrape."""
        meter = self.meter
        meter.gauge("gammaray.requests.active", lambda: admission.num_running)
        meter.gauge("gammaray.requests.waiting", lambda: admission.num_waiting)
        for pool in (fleet.drafts, fleet.targets):
            meter.gauge("gammaray.workers", pool.num_up, role=pool.role)

    def request(self, request: GenerationRequest) -> RequestMeter:
        return RequestMeter(self, is_resume=request.resume_from is not None)

    def cycle(self, cycle: Cycle, plain_cycle_s: float | None) -> None:
        """Count a cycle without the tokens after the end of the completion, which no client sees."""
        emitted = len(cycle.token_ids)
        accepted = cycle.origins.count(TokenOrigin.ACCEPTED)
        self.cycles[cycle.drafter].value += 1
        self.fallbacks.value += cycle.is_fallback
        if cycle.num_drafted > 0:
            self._num_drafts += 1
            self._num_drafted += cycle.num_drafted
            self.tested.value += min(cycle.num_tested, emitted)
            self.accepted.value += accepted
            self._positions += [0] * (accepted - len(self._positions))
            for position in range(accepted):
                self._positions[position] += 1
        self.tokens[TokenOrigin.ACCEPTED].value += accepted
        if emitted > accepted:
            self.tokens[cycle.origins[-1]].value += emitted - accepted
        self.gamma.observe(cycle.gamma)
        _split(self.parts, cycle)
        if not cycle.is_first and plain_cycle_s is not None:
            self.decode_s.value += cycle.total_s
            self.plain_s.value += emitted * plain_cycle_s

    def outcome(self, name: str) -> Counter:
        if name not in self._outcomes:
            self._outcomes[name] = self.meter.counter("gammaray.requests", outcome=name)
        return self._outcomes[name]

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Accepted tokens by depth in the proposal, from depth 1."""
        return tuple(self._positions)

    @property
    def totals(self) -> SpeculationTotals:
        ended = {name: int(counter.value) for name, counter in list(self._outcomes.items())}
        return SpeculationTotals(
            cycles=int(sum(counter.value for counter in self.cycles.values())),
            drafts=self._num_drafts,
            draft_tokens=self._num_drafted,
            tested_tokens=int(self.tested.value),
            accepted_tokens=int(self.accepted.value),
            emitted_tokens=int(sum(counter.value for counter in self.tokens.values())),
            gamma_sum=int(self.gamma.total),
            decode_us=int(self.decode_s.value * 1e6),
            plain_us=int(self.plain_s.value * 1e6),
            requests=sum(ended.values()),
            failed_requests=sum(count for name, count in ended.items() if name not in _GOOD),
        )


class RequestMeter:
    """Counts one request; a context manager around its handling."""

    def __init__(self, shared: OrchestratorMeter, *, is_resume: bool) -> None:
        self._shared, self._is_resume = shared, is_resume
        self._arrived = time.perf_counter()
        self._first = self._last = 0.0
        self._num_later = 0
        self._finish: FinishReason | None = None

    def deliver(self, chunk: Chunk) -> None:
        now = time.perf_counter()
        if self._first:
            self._shared.between_s.observe(now - self._last)
            self._num_later += len(chunk.tokens)
        else:
            self._first = now
            if not self._is_resume:
                self._shared.first_token_s.observe(now - self._arrived)
        self._last = now
        self._finish = chunk.finish_reason
        if chunk.usage is not None:
            self._shared.prompt_tokens.value += chunk.usage.prompt_tokens

    def __enter__(self) -> RequestMeter:
        return self

    def __exit__(self, _: object, error: BaseException | None, *rest: object) -> None:
        shared, took_s = self._shared, time.perf_counter() - self._arrived
        outcome = _outcome_of(error) if self._finish is None else self._finish.value
        shared.outcome(outcome).value += 1
        _access_log.info("COMPLETION %s %.1fms", outcome, 1000 * took_s, extra={"serve_access_log": True})
        if self._finish is None:
            return
        shared.request_s.observe(took_s)
        if self._num_later > 0:
            shared.per_token_s.observe((self._last - self._first) / self._num_later)


def _split(parts: tuple[Counter, ...], cycle: Cycle) -> None:
    draft, queue, step, wire, other = parts
    queue_s = step_s = 0.0
    if cycle.timing is not None:  # from the worker's clock, hence the bounds
        queue_s = min(cycle.timing.queue_s, cycle.verify_s)
        step_s = min(cycle.timing.compute_s, cycle.verify_s - queue_s)
    draft.value += cycle.draft_s
    queue.value += queue_s
    step.value += step_s
    wire.value += cycle.verify_s - queue_s - step_s
    other.value += max(0.0, cycle.total_s - cycle.draft_s - cycle.verify_s)


def _outcome_of(error: BaseException | None) -> str:
    if error is None or isinstance(error, GeneratorExit | asyncio.CancelledError):
        return FinishReason.CANCELLED.value
    return error.status.name.lower() if isinstance(error, GammarayError) else "internal"
