"""An OTLP/gRPC receiver of metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc


class MetricsReceiver(metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps what is pushed.

    Attributes:
        endpoint: What OTEL_EXPORTER_OTLP_ENDPOINT has to be.
        requests: What came, in order.
        came: Set when something has come.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[metrics_service_pb2.ExportMetricsServiceRequest] = []
        self.came = asyncio.Event()

    async def Export(self, request: Any, context: Any) -> metrics_service_pb2.ExportMetricsServiceResponse:
        self.requests.append(request)
        self.came.set()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@asynccontextmanager
async def receiving_metrics() -> AsyncIterator[MetricsReceiver]:
    receiver, server = MetricsReceiver(), grpc.aio.server()
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(0)
