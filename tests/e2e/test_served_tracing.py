"""Traces of a whole cluster: both APIs use the callers' contexts, and other requests are not traced."""

from functools import partial

import pytest
from opentelemetry import trace

from gammaray import Client
from gammaray.telemetry import names as t

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"
TRACE_IDS, SPAN_ID = {"gRPC": 0x0AF7651916CD43DD8448EB211C80319C, "HTTP": 7}, 0xB7AD6B7169203331
TIMEOUT_S = 60.0


def roots(spans, trace_id):
    return [one for one in spans if one.name == t.SPAN_GENERATE and one.trace_id == f"{trace_id:032x}"]


def is_whole(trace_id, number, spans):
    """Whether so many generations of a trace have come, and spans of a worker too."""
    services = {one.resource["service.name"] for one in spans if one.trace_id == f"{trace_id:032x}"}
    return len(roots(spans, trace_id)) == number and "gammaray-target" in services


def test_both_apis_continue_the_traces_of_their_callers(cluster, collector):
    _, receiver = collector
    with Client(cluster.grpc) as client:
        untraced = client.complete(PROMPT, max_tokens=8, seed=1)
        flags = trace.TraceFlags(1)
        context = trace.SpanContext(TRACE_IDS["gRPC"], SPAN_ID, is_remote=False, trace_flags=flags)
        with trace.use_span(trace.NonRecordingSpan(context)):
            client.complete(PROMPT, max_tokens=8, seed=1)
    headers = {"traceparent": f"00-{TRACE_IDS['HTTP']:032x}-{SPAN_ID:016x}-01"}
    with cluster.openai() as client:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, n=2, extra_headers=headers)
    for name, number in (("gRPC", 1), ("HTTP", 2)):
        received = receiver.wait(partial(is_whole, TRACE_IDS[name], number), TIMEOUT_S)
        assert {root.parent_id for root in roots(received, TRACE_IDS[name])} == {f"{SPAN_ID:016x}"}
    assert untraced.session_id not in {span.attributes.get(t.SESSION_ID) for span in receiver.spans}
