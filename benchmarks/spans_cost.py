"""CPU time of a traced cycle: spans written from records, as gammaray does, and the same spans by the SDK.

    python -m benchmarks.spans_cost

A cycle with a draft and a target worker has four spans in the orchestrator and one in each worker. *serving*
is the time in the thread that serves: queueing a bundle, or creating the SDK's spans with the same names,
times and attributes, which are given as finished dictionaries. *export* is the encoding as OTLP in the
exporter's thread, which shares the GIL with the other one. Sending is the same for both and left out. The
variants take turns, and the least of several runs counts. `benchmarks.tracing_cost` measures the whole on a
cluster.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind
from rich.console import Console

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from gammaray.blocks import Shape
from gammaray.telemetry.otel import process_resource
from gammaray.types import Proposal, SamplingParams, TokenOrigin, VerificationMethod
from gammaray.v1 import generation_service_pb2 as pb
from gammaray.v1 import types_pb2 as types_pb
from orchestrator.cycle.session import Session
from orchestrator.telemetry.spans import CycleBundle, SessionTrace
from services.scheduling.tasks import ProposeTask, Reply, Task, Timing, VerifyTask
from services.streaming.tracing import BlockTracer
from services.verification.rules import Verdict

CYCLES, REPEATS = 1000, 7
NOW_NS = 1_700_000_000_000_000_000


class _Queue(SpanProcessor):
    """Keeps ended spans and bundles, as the batch processor does until it exports them."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def on_end(self, span: Any) -> None:
        self.ended.append(span)


class _Text:
    """Leaves the text out."""

    def push(self, token_id: int) -> bool:
        return False

    def take(self, *, final: bool) -> str:
        return ""


@dataclass(frozen=True)
class _Given:
    """A span's contents, as the SDK takes them."""

    name: str
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_child: bool


def _session() -> Session:
    return Session(
        session_id="tenant/5f0c7a3e9b1d4c62",
        prompt=(1, 2, 3),
        params=SamplingParams(temperature=0.7, seed=1),
        method=VerificationMethod.COUPLED,
        max_tokens=64,
        text=_Text(),
    )


def _record() -> pb.CycleRecord:
    """Return the record of a cycle of gamma 4."""
    timing = types_pb.WorkerTiming(
        queue_us=40, compute_us=1900, forward_us=1700, batch_size=1, batch_tokens=5
    )
    call = pb.WorkerCall(
        address="127.0.0.1:40123", blocks=1, request_bytes=96, response_bytes=64, timing=timing
    )
    return pb.CycleRecord(
        start_us=NOW_NS // 1000,
        total_us=4700,
        propose_us=1200,
        verify_us=2900,
        epoch=1,
        base_position=120,
        gamma=4,
        gamma_reason="best",
        drafted=4,
        tested=3,
        accepted=2,
        emitted=3,
        next_origin=types_pb.TOKEN_ORIGIN_CORRECTION,
        drafter=types_pb.DRAFTER_KIND_MODEL,
        draft=call,
        target=call,
    )


def _blocks(traceparent: str) -> list[tuple[Task, Reply]]:
    """Return the blocks of a cycle with their replies."""
    common: dict[str, Any] = {
        "request_id": 1,
        "session_id": "tenant/5f0c7a3e9b1d4c62",
        "epoch": 1,
        "base_position": 120,
        "context_start": 117,
        "context": (5, 6, 7),
        "spec": None,
        "deadline": 0.0,
        "deliver": lambda *_: None,
        "traceparent": traceparent,
    }
    timing = Timing(40, 1900, 1700, 1, 5, 1)
    proposal = Proposal(token_ids=(1, 2, 3, 4))
    verdict = Verdict((0, 1), 9, TokenOrigin.CORRECTION, 3)
    return [
        (ProposeTask(shape=Shape(4, 0, 0.1), **common), Reply(1, "s", proposal, timing)),
        (VerifyTask(proposal=proposal, num_top_logprobs=None, **common), Reply(1, "s", verdict, timing)),
    ]


class Recorded:
    """The spans as gammaray exports them: bundles that are encoded from records.

    Args:
        root: Span of the generation.
    """

    def __init__(self, root: trace.Span) -> None:
        self._queue = _Queue()
        self._trace = SessionTrace(root, self._queue, NOW_NS)
        self._trace.bind(_session())
        self._record, self._tracer = _record(), BlockTracer(self._queue)
        self._blocks = _blocks(self._trace.traceparent)

    def orchestrator(self, index: int) -> None:
        """Queue the spans of a cycle, but the one for opening the session."""
        self._trace.put(CycleBundle(self._trace, index, self._record, stored_ns=NOW_NS + 5_000_000))

    def workers(self, index: int) -> None:
        """Queue the spans of its two blocks."""
        for task, reply in self._blocks:
            self._tracer.answered(task, reply)

    def take(self) -> list[Any]:
        """Return what is queued."""
        ended, self._queue.ended = self._queue.ended, []
        return ended

    @staticmethod
    def encode(ended: Sequence[Any]) -> bytes:
        """Encode them as OTLP."""
        scope = ScopeSpans()
        for bundle in ended:
            bundle.encode(scope.spans)
        return scope.SerializeToString()


class Sdk:
    """The same spans by the SDK.

    Args:
        tracer: Creates them.
        queue: The processor of the tracer's provider.
        root: Span of the generation.
        cycle: The orchestrator's spans of a cycle, the parent of the others first.
        blocks: The workers' spans of a cycle.
    """

    def __init__(
        self,
        tracer: trace.Tracer,
        queue: _Queue,
        root: trace.Span,
        cycle: Sequence[_Given],
        blocks: Sequence[_Given],
    ) -> None:
        self._tracer, self._queue = tracer, queue
        self._root = trace.set_span_in_context(root)
        self._cycle, self._blocks = cycle, blocks

    def orchestrator(self, index: int) -> None:
        """Create and end the spans of a cycle."""
        parent = self._root
        for given in self._cycle:
            span = self._start(given, parent if given.is_child else self._root)
            if not given.is_child:
                parent = trace.set_span_in_context(span)
            span.end(given.end_ns)

    def workers(self, index: int) -> None:
        """Create and end the spans of its two blocks."""
        for given in self._blocks:
            self._start(given, self._root).end(given.end_ns)

    def take(self) -> list[Any]:
        """Return what has ended."""
        ended, self._queue.ended = self._queue.ended, []
        return ended

    @staticmethod
    def encode(ended: Sequence[Any]) -> bytes:
        """Encode them as OTLP."""
        return encode_spans(ended).SerializeToString()

    def _start(self, given: _Given, parent: Any) -> trace.Span:
        return self._tracer.start_span(
            given.name, parent, given.kind, attributes=given.attributes, start_time=given.start_ns
        )


def given_spans(ended: Sequence[Any]) -> list[_Given]:
    """Return the contents of bundles as the SDK takes them."""
    scope = ScopeSpans()
    for bundle in ended:
        bundle.encode(scope.spans)
    parent = scope.spans[0].span_id
    return [
        _Given(
            span.name,
            SpanKind(span.kind - 1),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes},
            span.parent_span_id == parent,
        )
        for span in scope.spans
    ]


def microseconds(variant: Recorded | Sdk, call: Callable[[int], None]) -> tuple[float, float, int]:
    """Return CPU microseconds per cycle of serving and of export, and bytes per cycle."""
    began = time.thread_time()
    for index in range(1, CYCLES + 1):
        call(index)
    served = time.thread_time()
    ended = variant.take()
    between = time.thread_time()
    data = variant.encode(ended)
    return (served - began) / CYCLES * 1e6, (time.thread_time() - between) / CYCLES * 1e6, len(data) // CYCLES


def make_variants() -> tuple[Recorded, Sdk]:
    """Return both ways to export the spans of the same cycle."""
    queue = _Queue()
    provider = TracerProvider(resource=process_resource("orchestrator"), shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("gammaray")
    root = tracer.start_span("gammaray.generate")
    recorded = Recorded(root)
    recorded.orchestrator(1)
    cycle = given_spans(recorded.take())
    recorded.workers(1)
    return recorded, Sdk(tracer, queue, root, cycle, given_spans(recorded.take()))


def measure() -> dict[str, Any]:
    """Return the microseconds of both variants, by process."""
    variants = dict(zip(("records", "sdk"), make_variants(), strict=True))
    rows: dict[str, Any] = {}
    for process in ("orchestrator", "workers"):
        runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in variants}
        for _ in range(REPEATS):
            for name, variant in variants.items():
                runs[name].append(microseconds(variant, getattr(variant, process)))
        rows[process] = {
            name: {
                "serving_us": min(run[0] for run in found),
                "export_us": min(run[1] for run in found),
                "bytes": found[0][2],
            }
            for name, found in runs.items()
        }
    return {"cycles": CYCLES, "repeats": REPEATS, "rows": rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cycle-ms", type=float, default=4.77, help="cycle that the shares are of (gamma 4)")
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    result = {"cycle_ms": options.cycle_ms, **measure()}
    table = plain_table(
        "CPU time of a traced cycle",
        ("process", "spans by", "serving (us)", "export (us)", f"of {options.cycle_ms:g} ms", "bytes"),
    )
    for process, rows in result["rows"].items():
        for name, row in rows.items():
            both = row["serving_us"] + row["export_us"]
            share = f"{both / options.cycle_ms / 10:.1f} %"
            cells = (f"{row['serving_us']:.1f}", f"{row['export_us']:.1f}", share, str(row["bytes"]))
            table.add_row(process, name, *cells)
    Console().print(table)
    print(f"written to {write_result('spans-cost', result, options.out)}")


if __name__ == "__main__":
    main()
