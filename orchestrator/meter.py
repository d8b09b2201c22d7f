"""What an orchestrator counts: cycles, requests and their latencies. Some microseconds per cycle."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from gammaray.errors import GammarayError
from gammaray.meter import Counter, Meter
from gammaray.processes import SpeculationTotals
from gammaray.types import DrafterKind, FinishReason, TokenOrigin
from orchestrator.cycle import Cycle

__all__ = ["OrchestratorMeter", "RequestMeter"]

_PARTS = ("draft", "target_queue", "target_step", "target_wire", "other")
_GOOD = tuple(reason.value for reason in FinishReason)


class OrchestratorMeter:
    """The metrics of one orchestrator.

    Attributes:
        meter: Where they are.
    """

    def __init__(self) -> None:
        self.meter = meter = Meter()
        prefix = "gammaray.spec_decode.num_"
        self.drafts = meter.counter(f"{prefix}drafts")
        self.drafted = meter.counter(f"{prefix}draft_tokens")
        self.tested = meter.counter(f"{prefix}tested_tokens")
        self.accepted = meter.counter(f"{prefix}accepted_tokens")
        self.positions: list[Counter] = []
        self.tokens = {kind: meter.counter("gammaray.tokens", origin=kind.value) for kind in TokenOrigin}
        self.cycles = {kind: meter.counter("gammaray.cycles", rung=kind.value) for kind in DrafterKind}
        self.fallbacks = meter.counter("gammaray.cycle.fallbacks")
        self.gamma = meter.histogram("gammaray.cycle.gamma")
        self.duration = meter.histogram("gammaray.cycle.duration")
        self.parts = tuple(meter.counter("gammaray.cycle.time", part=part) for part in _PARTS)
        self.decode_s = meter.counter("gammaray.decode.time")
        self.plain_s = meter.counter("gammaray.decode.plain_time")
        self.prompt_tokens = meter.counter("gammaray.prompt.tokens")
        self.request_s = meter.histogram("gammaray.request.duration")
        self.first_token_s = meter.histogram("gammaray.time_to_first_token")
        self.per_token_s = meter.histogram("gammaray.time_per_output_token")
        self.between_s = meter.histogram("gammaray.inter_token_latency")
        self._outcomes: dict[str, Counter] = {}
        for outcome in _GOOD:
            self.outcome(outcome)

    def request(self) -> RequestMeter:
        """Return the meter of a request that arrives now."""
        return RequestMeter(self)

    def outcome(self, name: str) -> Counter:
        """Return the counter of requests that ended in one way."""
        if name not in self._outcomes:
            self._outcomes[name] = self.meter.counter("gammaray.requests", outcome=name)
        return self._outcomes[name]

    def accepted_at(self, num_accepted: int) -> None:
        """Count one accepted token at each of the first `num_accepted` positions of a proposal."""
        positions = self.positions
        while len(positions) < num_accepted:
            name = "gammaray.spec_decode.num_accepted_tokens_per_pos"
            positions.append(self.meter.counter(name, position=str(len(positions))))
        for position in range(num_accepted):
            positions[position].value += 1

    @property
    def totals(self) -> SpeculationTotals:
        """What the cycles came to so far."""
        ended = {name: int(counter.value) for name, counter in list(self._outcomes.items())}
        return SpeculationTotals(
            cycles=int(sum(counter.value for counter in self.cycles.values())),
            drafts=int(self.drafts.value),
            draft_tokens=int(self.drafted.value),
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
    """Counts one request: a context around all of its handling.

    Args:
        shared: The orchestrator's meter.
    """

    def __init__(self, shared: OrchestratorMeter) -> None:
        self._shared = shared
        self._arrived = time.perf_counter()
        self._first = self._last = 0.0
        self._num_cycles = self._num_later = 0
        self._finish: FinishReason | None = None

    def cycle(self, cycle: Cycle, *, tested: int, accepted: int, plain_cycle_s: float | None) -> None:
        """Count a cycle whose chunk is about to be delivered.

        Args:
            cycle: What it did.
            tested: Proposed tokens that were put to the test, as the client is told.
            accepted: Those of them that were emitted.
            plain_cycle_s: Seconds of a cycle at gamma 0 at this moment; None while that is unknown.
        """
        shared, emitted = self._shared, len(cycle.token_ids)
        shared.cycles[cycle.drafter].value += 1
        shared.fallbacks.value += cycle.is_fallback
        if cycle.num_drafted > 0:
            shared.drafts.value += 1
            shared.drafted.value += cycle.num_drafted
            shared.tested.value += tested
            shared.accepted.value += accepted
            shared.accepted_at(accepted)
        shared.tokens[TokenOrigin.ACCEPTED].value += accepted
        if emitted > accepted:
            shared.tokens[cycle.origins[-1]].value += emitted - accepted
        shared.gamma.observe(cycle.gamma)
        _split(shared.parts, cycle)
        shared.duration.observe(cycle.total_s)
        if self._num_cycles > 0 and plain_cycle_s is not None:
            shared.decode_s.value += cycle.total_s
            shared.plain_s.value += emitted * plain_cycle_s
        self._deliver(emitted)
        self._finish = cycle.finish_reason

    def _deliver(self, num_tokens: int) -> None:
        now = time.perf_counter()
        if self._num_cycles == 0:
            self._first = now
            self._shared.first_token_s.observe(now - self._arrived)
        else:
            self._shared.between_s.observe(now - self._last)
            self._num_later += num_tokens
        self._last = now
        self._num_cycles += 1

    def __enter__(self) -> RequestMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        shared = self._shared
        if self._finish is not None:
            shared.outcome(self._finish.value).value += 1
            shared.request_s.observe(time.perf_counter() - self._arrived)
            if self._num_later > 0:
                shared.per_token_s.observe((self._last - self._first) / self._num_later)
        else:
            shared.outcome(_outcome_of(error)).value += 1


def _split(parts: tuple[Counter, ...], cycle: Cycle) -> None:
    """Add up where a cycle's time went; the parts of a cycle are its whole."""
    draft, queue, step, wire, other = parts
    queue_s = step_s = 0.0
    if cycle.timing is not None:  # the worker's clock is its own
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
