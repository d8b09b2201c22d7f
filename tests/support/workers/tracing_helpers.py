"""Workers of the demo pair that export their spans, and what to ask of a trace."""

import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from docs.make_telemetry import ATTRIBUTES, SPANS
from gammaray.telemetry import names as telemetry
from tests.support.otlp_receiver import ReceivedSpan
from tests.support.workers.service_helpers import worker_process

STOP_TIMEOUT_S = 60.0
MICROSECOND_NS = 1000
ASKING, SERVING = ("client", "producer"), ("server", "consumer")


@contextmanager
def exporting_worker(
    role: str, environment: dict[str, str], model: str = "demo"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a worker, with the demo pair by default; yields its process and address. Ends it with SIGTERM."""
    with worker_process(role, model, environment=environment) as (process, address):
        yield process, address
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_TIMEOUT_S)


def of_trace(spans: Sequence[ReceivedSpan], trace_id: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.trace_id == trace_id]


def named(spans: Sequence[ReceivedSpan], name: str, kind: str | None = None) -> list[ReceivedSpan]:
    found = [span for span in spans if span.name == name and kind in (None, span.kind)]
    return sorted(found, key=lambda span: span.start_ns)


def is_whole(spans: Sequence[ReceivedSpan]) -> bool:
    """Return whether a generation has ended, and its cycles and the workers' sides of them have come."""
    roots = named(spans, telemetry.SPAN_GENERATE)
    if not roots or len(named(spans, telemetry.SPAN_CYCLE)) != roots[0].attributes[telemetry.CYCLES]:
        return False
    asked = [span for span in spans if span.kind in ASKING and not span.is_error]
    num_served = sum(span.kind in SERVING for span in spans if span.name != telemetry.SPAN_GENERATE)
    return num_served >= sum(span.attributes[telemetry.BLOCKS] for span in asked)


def children(spans: Sequence[ReceivedSpan]) -> dict[str, list[ReceivedSpan]]:
    found = defaultdict(list)
    for span in spans:
        found[span.parent_id].append(span)
    return found


def assert_nested(spans: Sequence[ReceivedSpan]) -> None:
    """Every span that is waited for lies within its parent, to the microsecond that records are kept in."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        assert span.start_ns <= span.end_ns, span
        parent = by_id.get(span.parent_id)
        if parent is not None and span.kind != "consumer":
            assert parent.start_ns - MICROSECOND_NS <= span.start_ns, (span, parent)
            assert span.end_ns <= parent.end_ns + MICROSECOND_NS, (span, parent)


def assert_as_documented(span: ReceivedSpan) -> None:
    """The span is one of the catalogue, with all of its attributes that it must have and no other."""
    spec = next(spec for spec in SPANS if (spec.name, spec.kind) == (span.name, span.kind))
    assert span.resource["service.name"] == f"gammaray-{spec.process}"
    names = set(span.attributes)
    assert set(spec.always) <= names, set(spec.always) - names
    assert names <= {*spec.always, *spec.sometimes}, names - {*spec.always, *spec.sometimes}
    types = {"string": str, "boolean": bool, "int": int, "double": float, "string[]": list}
    for name in names:
        attribute = next(known for known in ATTRIBUTES if known.name == name)
        assert type(span.attributes[name]) is types[attribute.type], name
