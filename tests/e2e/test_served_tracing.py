"""Traces of a whole cluster: both APIs use the callers' contexts, and other requests are not traced."""

from __future__ import annotations

import itertools

import pytest
from opentelemetry import trace

from gammaray import Client
from gammaray.telemetry import names as t
from tests.support.cluster.cluster_helpers import is_without_model, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
SERVICES = {"gammaray-orchestrator", "gammaray-draft", "gammaray-target"}
TIMEOUT_S = 60.0


def whole(spans, trace_id):
    """Return the spans of a trace once it has ended, all services sent and verifications have both sides."""
    mine = [span for span in spans if span.trace_id == f"{trace_id:032x}"]
    verified = [span for span in mine if span.name == t.SPAN_VERIFY]
    roots = [span for span in mine if span.name == t.SPAN_GENERATE]
    num_cycles = roots[0].attributes[t.CYCLES] if roots else -1
    services = {span.resource["service.name"] for span in mine}
    return mine if len(verified) == 2 * num_cycles and services == SERVICES else []


def test_trace_of_a_grpc_caller_spans_the_processes_of_the_cluster(cluster, collector):
    _, receiver = collector
    trace_ids = itertools.count(TRACE_ID, 0x100)  # a trace to each attempt
    with Client(cluster.grpc) as client:
        untraced = client.complete(PROMPT, max_tokens=24, seed=1)

        def complete():
            nonlocal trace_id
            trace_id = next(trace_ids)
            context = trace.SpanContext(trace_id, SPAN_ID, is_remote=False, trace_flags=trace.TraceFlags(1))
            with trace.use_span(trace.NonRecordingSpan(context)):
                return client.complete(PROMPT, max_tokens=48, seed=1, gamma=2, ignore_eos=True)

        trace_id = 0
        traced = undisturbed(complete, is_without_model)
    spans = whole(receiver.wait(lambda spans: bool(whole(spans, trace_id)), TIMEOUT_S), trace_id)
    (root,) = [span for span in spans if span.name == t.SPAN_GENERATE]
    assert root.parent_id == f"{SPAN_ID:016x}"
    assert root.attributes[t.SESSION_ID] == traced.session_id
    assert root.attributes[t.CYCLES] == traced.summary.cycles
    services = {span.resource["service.name"]: span.resource["process.pid"] for span in spans}
    assert services.keys() == SERVICES
    known = {process.role: process.pid for process in cluster.status()}
    assert known.keys() == {"orchestrator", "draft", "target", "redis"}
    assert services == {f"gammaray-{role}": known[role] for role in ("orchestrator", "draft", "target")}
    assert untraced.session_id not in {span.attributes.get(t.SESSION_ID) for span in receiver.spans}


def test_trace_of_an_http_caller_has_a_span_per_choice(cluster, collector):
    _, receiver = collector
    trace_id = TRACE_ID + 1
    headers = {"traceparent": f"00-{trace_id:032x}-{SPAN_ID:016x}-01"}
    with cluster.openai() as client:
        client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=8, n=2, temperature=0.5, extra_headers=headers
        )

    def roots(spans):
        return [s for s in spans if s.name == t.SPAN_GENERATE and s.trace_id == f"{trace_id:032x}"]

    found = roots(receiver.wait(lambda spans: len(roots(spans)) == 2, TIMEOUT_S))
    assert {root.parent_id for root in found} == {f"{SPAN_ID:016x}"}
    assert len({root.attributes[t.SESSION_ID] for root in found}) == 2
