"""The gRPC server of a worker: health, reflection, limits and graceful shutdown."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from gammaray.blocks import MAX_ANSWER_BYTES
from gammaray.checks import join_address, split_address
from gammaray.config import WorkerSettings
from gammaray.deploy.redis_connection import connect
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.security.tls import TlsFiles, check_peer, server_credentials, tls_files
from gammaray.telemetry.prometheus import metrics_address
from services.process.addresses import check_announced

DRAIN_TIMEOUT_S = 10.0
"""Seconds for running blocks to finish after SIGTERM; then orchestrators repeat them on other workers. Well
within the 50 s that the chart's default grace period leaves for draining a pod."""

MAX_MESSAGE_BYTES = 8 << 20
"""Largest frame that is read; fits the longest context (2^20 ids) and the masks of its session."""

MAX_RPCS = 512
"""Calls open at once, most of them streams of orchestrators; more are refused."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    # Streams live for hours and an orchestrator's machine may fail without closing the connection: ping after
    # 20 s of silence and drop the connection after 5 s without an answer, so that the stream is closed.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # for the answer; 60 s by default
    ("grpc.keepalive_permit_without_calls", 1),
    # Orchestrators also ping, to detect a dead worker between cycles; the default would answer with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise two workers could bind the same port and each would get half of the connections.
    ("grpc.so_reuseport", 0),
]


class GrpcServer:
    """A grpc.aio server of the named services, with health and reflection; without `tls` in plain text."""

    def __init__(self, service_names: Sequence[str], tls: TlsFiles | None = None) -> None:
        self._names, self._tls = ("", *service_names), tls
        self._health = health_aio.HealthServicer()
        self.server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=MAX_RPCS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflected = (*service_names, HEALTH_SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self.server)

    async def start(self, listen: str) -> str:
        """Bind `listen` (host:port, port 0 takes a free one), serve, and return the bound host:port."""
        host, _ = split_address("listen", listen)
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(listen)
            else:
                port = self.server.add_secure_port(listen, server_credentials(self._tls))
        except RuntimeError as error:
            raise InvalidArgumentError("listen", listen, "an address that can be bound") from error
        await self.server.start()
        await self.set_serving(True)
        return join_address(host, port)

    async def set_serving(self, is_serving: bool) -> None:
        """Set the status that the health service reports."""
        serving = health_pb2.HealthCheckResponse.ServingStatus
        status = serving.SERVING if is_serving else serving.NOT_SERVING
        for name in self._names:
            await self._health.set(name, status)


def check_serving(settings: WorkerSettings, host: str = "") -> None:
    """Refuse settings of addresses, TLS and Redis that a worker cannot serve with, before it loads a model.

    Orchestrators connect to `host` if the server listens on every interface.
    """
    split_address("listen", settings.listen)
    if settings.metrics_listen:
        metrics_address(settings.metrics_listen)
    tls_files(settings)
    if settings.redis_url:
        connect(settings.redis_login_url, timeout_s=1, num_retries=0)  # connects on first use
        check_announced(settings.listen, settings.redis_url, host)


@asynccontextmanager
async def guarded(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Guard a call: unauthorised peers are refused, and a GammarayError ends the call with its status."""
    try:
        check_peer(context)
        yield
    except GammarayError as error:
        await context.abort(error.status, str(error))
