"""A small OTLP/gRPC receiver that keeps the spans it gets."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc

KINDS = ("unspecified", "internal", "server", "client", "producer", "consumer")


@dataclass(frozen=True)
class ReceivedSpan:
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int  # nanoseconds since 1970
    end_ns: int  # the same
    is_error: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)  # what the process says of itself


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes exports; safe to read from another thread."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        with self._changed:
            self.spans.extend(_spans(request))
            self._changed.notify_all()
        return pb.ExportTraceServiceResponse()

    def wait(self, condition: Callable[[list[ReceivedSpan]], bool], timeout_s: float) -> list[ReceivedSpan]:
        """Return the spans as soon as they meet a condition; TimeoutError if they do not in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self.spans), timeout_s):
                raise TimeoutError(f"{len(self.spans)} spans came, not those that were waited for")
            return list(self.spans)


@contextmanager
def receiving() -> Iterator[tuple[str, Receiver]]:
    """Run a receiver on a free loopback port; yields OTEL_EXPORTER_OTLP_ENDPOINT and itself."""
    server = grpc.server(ThreadPoolExecutor(2), options=(("grpc.max_receive_message_length", 64 * 2**20),))
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    bound = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{bound}", receiver
    finally:
        server.stop(grace=0.5).wait(2.0)


def _spans(request: pb.ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                ids = (one.hex() for one in (span.trace_id, span.span_id, span.parent_span_id))
                times = span.start_time_unix_nano, span.end_time_unix_nano
                has_failed, attributes = span.status.code == 2, _attributes(span.attributes)
                yield ReceivedSpan(
                    span.name, KINDS[span.kind], *ids, *times, has_failed, attributes, resource
                )


def _attributes(entries: Iterable[Any]) -> dict[str, Any]:
    return {entry.key: _value(entry.value) for entry in entries}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
