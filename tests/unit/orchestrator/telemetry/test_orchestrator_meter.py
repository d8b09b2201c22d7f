"""Metrics of an orchestrator: the numbers of the client's summary, and latencies of requests."""

import asyncio
import time

import pytest

from gammaray.blocks import VerifyTiming
from gammaray.errors import InvalidArgumentError, UnavailableError
from gammaray.telemetry.meter import Counter, Histogram
from gammaray.types import (
    Chunk,
    DrafterKind,
    EmittedToken,
    FinishReason,
    GenerationRequest,
    TokenOrigin,
    Usage,
)
from orchestrator.cycle.types import Cycle
from orchestrator.telemetry.metrics import OrchestratorMeter

ACCEPTED, CORRECTION, BONUS = TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION, TokenOrigin.BONUS


def cycle(origins, *, drafted=4, tested=3, is_first=False, timing=None, **fields):
    values = {
        **{"gamma": 5, "num_drafted": drafted, "num_tested": tested, "num_accepted": origins.count(ACCEPTED)},
        **{"token_ids": tuple(range(len(origins))), "origins": origins, "logprobs": (), "text": ""},
        **{"draft_s": 0.001, "verify_s": 0.004, "total_s": 0.006, "is_first": is_first, "timing": timing},
        **{"finish_reason": None, "draft_failed": False},
        "drafter": DrafterKind.MODEL if drafted else DrafterKind.NONE,
    }
    return Cycle(**{**values, **fields})


def samples(meter):
    """Return the value of each series, a histogram's as (count, sum)."""
    found = {}
    for metric, series in meter.meter.read():
        for labels, value in series:
            key = metric.name.removeprefix("gammaray."), *labels.values()
            if isinstance(value, Histogram):
                found[key] = (sum(value.counts), value.total)
            else:
                found[key] = value.value if isinstance(value, Counter) else value()
    return found


def test_cycle_counters_equal_the_summary_of_the_client():
    meter = OrchestratorMeter()
    meter.cycle(cycle((ACCEPTED, ACCEPTED, CORRECTION)), 0.003)
    meter.cycle(cycle((ACCEPTED,) * 4 + (BONUS,), tested=4), 0.003)
    meter.cycle(cycle((BONUS,), drafted=0, tested=0, is_fallback=True), 0.003)
    found = samples(meter)
    totals = meter.totals
    assert (totals.cycles, totals.drafts, totals.draft_tokens, totals.tested_tokens) == (3, 2, 8, 7)
    assert (totals.accepted_tokens, totals.emitted_tokens, totals.gamma_sum) == (6, 9, 15)
    assert found["spec_decode.num_tested_tokens",] == 7
    assert found["spec_decode.num_accepted_tokens",] == 6
    assert meter.accepted_per_position == (2, 2, 1, 1)
    assert [found["tokens", kind.value] for kind in (ACCEPTED, CORRECTION, BONUS)] == [6, 1, 2]
    assert [found["cycles", kind] for kind in ("model", "suffix", "none")] == [2, 0, 1]
    assert found["cycle.fallbacks",] == 1
    assert found["cycle.gamma",] == (3, 15)


def test_tokens_after_the_end_of_a_completion_are_not_counted():
    meter = OrchestratorMeter()
    # Three of four were accepted; the completion ended after the first.
    meter.cycle(cycle((ACCEPTED,), tested=4, num_accepted=3, finish_reason=FinishReason.STOP), None)
    found = samples(meter)
    assert found["spec_decode.num_accepted_tokens",] == found["spec_decode.num_tested_tokens",] == 1
    assert meter.totals.draft_tokens == 4
    assert found["tokens", "accepted"] == 1


def test_first_cycles_are_not_compared_with_plain_decoding():
    meter = OrchestratorMeter()
    meter.cycle(cycle((ACCEPTED, BONUS), is_first=True), 0.005)
    meter.cycle(cycle((ACCEPTED, BONUS)), 0.005)
    meter.cycle(cycle((ACCEPTED, BONUS)), None)
    found, totals = samples(meter), meter.totals
    assert (found["decode.time",], found["decode.plain_time",]) == (0.006, 0.01)
    assert (totals.decode_us, totals.plain_us) == (6000, 10_000)


@pytest.mark.parametrize(
    ("timing", "parts"),
    [
        (None, [0.001, 0.0, 0.0, 0.004, 0.001]),
        (VerifyTiming(0.0005, 0.003, 1, 5, 5), [0.001, 0.0005, 0.003, 0.0005, 0.001]),
        (VerifyTiming(0.001, 0.009, 1, 5, 5), [0.001, 0.001, 0.003, 0.0, 0.001]),
    ],
    ids=["unknown", "known", "more than was waited"],
)
def test_parts_of_a_cycle_add_up(timing, parts):
    meter = OrchestratorMeter()
    meter.cycle(cycle((BONUS,), timing=timing), None)
    found = samples(meter)
    names = ("draft", "target_queue", "target_step", "target_wire", "other")
    assert [found["cycle.time", name] for name in names] == pytest.approx(parts)
    assert sum(found["cycle.time", name] for name in names) == pytest.approx(0.006)


def chunk(num_tokens, finish_reason=None):
    usage = Usage(7, 3, 1, 1) if finish_reason else None
    tokens = (EmittedToken(1, BONUS),) * num_tokens
    return Chunk("s", "", tokens, finish_reason=finish_reason, usage=usage)


async def served(meter, *chunks, error=None):
    """Stream chunks, and then fail if requested."""
    with meter.request(GenerationRequest("Hi")) as request:
        for piece in chunks:
            await asyncio.sleep(0.01)
            request.deliver(piece)
            yield piece
        if error is not None:
            raise error


LENGTH = FinishReason.LENGTH


async def test_request_has_its_latencies():
    meter, began = OrchestratorMeter(), time.perf_counter()
    assert len([piece async for piece in served(meter, chunk(1), chunk(2), chunk(3, LENGTH))]) == 3
    elapsed_s = time.perf_counter() - began
    found = samples(meter)
    assert found["requests", "length"] == 1
    assert found["prompt.tokens",] == 7
    num_first, first_s = found["time_to_first_token",]
    num_between, between_s = found["inter_token_latency",]
    assert (num_first, num_between) == (1, 2)
    assert found["time_per_output_token",] == (1, pytest.approx(between_s / 5))
    assert first_s > 0.009
    num_requests, duration_s = found["request.duration",]
    assert num_requests == 1
    assert first_s + between_s <= duration_s <= elapsed_s


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (UnavailableError("no target"), "unavailable"),
        (InvalidArgumentError("x", 1, "2"), "invalid_argument"),
        (KeyError("a bug"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_failures_are_counted_and_logged_by_their_kind(error, outcome, caplog):
    caplog.set_level("INFO", "ray.serve")
    meter = OrchestratorMeter()
    with pytest.raises(type(error)):
        [piece async for piece in served(meter, chunk(1), error=error)]
    found = samples(meter)
    assert found["requests", outcome] == 1
    assert [record.getMessage().split()[:2] for record in caplog.records] == [["COMPLETION", outcome]]
    assert found["request.duration",] == (0, 0.0)
    assert meter.totals.requests == 1
    assert meter.totals.failed_requests == (outcome != "cancelled")


@pytest.mark.parametrize(("num_read", "outcome"), [(1, "cancelled"), (2, "length")])
async def test_client_that_disconnects_early_counts_as_cancelled(num_read, outcome):
    meter = OrchestratorMeter()
    chunks = served(meter, chunk(1), chunk(1, LENGTH), chunk(0))
    for _ in range(num_read):
        await anext(chunks)
    await chunks.aclose()
    assert samples(meter)["requests", outcome] == 1
