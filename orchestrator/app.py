"""The orchestrator as a Ray Serve application: HTTP and gRPC in one deployment.

Serve routes requests to replicas and restarts replicas. It is not on the path of a cycle: replicas find the
workers in the registry and talk to them over their own gRPC streams.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from gammaray.config import OrchestratorSettings, PoolSize, ScalingSettings
from gammaray.deploy.serve_config import (
    APPLICATIONS,
    OrchestratorArguments,
    autoscaling_config,
    log_with_serve,
)
from gammaray.wire.metadata import APPLICATION
from orchestrator import HIDES_TORCH
from orchestrator.access.caller import Authenticator
from orchestrator.api.grpc_servicer import GenerationServicer
from orchestrator.api.http.server.app import create_app
from orchestrator.scaling_policy import IN_FLIGHT
from orchestrator.service import Orchestrator

# Above the orchestrator's own limit, which rejects excess requests with a retry delay. Serve would queue them
# without a limit.
_MAX_ONGOING_REQUESTS = 10_000


@serve.ingress()
class OrchestratorDeployment:
    """One replica."""

    def __init__(
        self, settings: Mapping[str, Any], probe_key_sha256: str = "", local_only: bool = False
    ) -> None:
        log_with_serve()
        self._settings = OrchestratorSettings(**settings)
        self._authenticator = Authenticator(self._settings.key_file, probe_key_sha256, local_only)
        logging.getLogger("ray.serve").addFilter(is_true)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        # Serve awaits this after the constructor and before any request, in the loop that serves them.
        self._orchestrator = orchestrator = await Orchestrator.start(self._settings)
        servicer = GenerationServicer(orchestrator, self._authenticator)
        # Serve finds the gRPC methods by these names, those of GenerationService.
        self.Generate, self.GetStatus = servicer.generate, servicer.get_status
        self.GetSession, self.GetSessionTrace = servicer.get_session, servicer.get_session_trace
        self.ListSessions = servicer.list_sessions
        self.Cancel, self.DeleteSession = servicer.cancel, servicer.delete_session
        return create_app(
            orchestrator,
            close=orchestrator.close,
            authenticator=self._authenticator,
            allowed_hosts=self._settings.allowed_hosts,
            cors_origins=self._settings.cors_origins,
        )

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of this replica; Serve calls it when the number of replicas may change."""
        return {IN_FLIGHT: float(self._orchestrator.num_requests)}


def is_true(record: logging.LogRecord) -> bool:
    """Return whether a record of Serve's log tells what happened.

    Its access log has OK for a gRPC call whose servicer sets a status, and CANCELLED if the client leaves
    after the last message; the servicer and `RequestMeter` log the outcomes. Serve logs the end of a
    generator, whose client left, as an unexpected error.
    """
    is_serves_call = f"CALL {APPLICATION} " in record.getMessage()
    return not is_serves_call and (record.exc_info is None or record.exc_info[0] is not GeneratorExit)


def build(
    settings: Mapping[str, Any],
    num_replicas: int | PoolSize = 1,
    scaling: Mapping[str, Any] | None = None,
    *,
    probe_key_sha256: str = "",
    local_only: bool = False,
) -> Application:
    """Return the application; `scaling` has fields of `ScalingSettings`, used if the bounds differ."""
    size = PoolSize.parse(num_replicas)
    count: dict[str, Any] = {"num_replicas": size.minimum}
    if size.is_elastic:
        limits = ScalingSettings(**(scaling or {}))
        count = {"autoscaling_config": autoscaling_config("orchestrator", size, limits)}
    configure = serve.deployment(
        name=APPLICATIONS["orchestrator"].deployment,
        max_ongoing_requests=_MAX_ONGOING_REQUESTS,
        # Mostly I/O-bound, and without a use for torch.
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {HIDES_TORCH: "1"}}},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=5,
        max_constructor_retry_count=3,
        **count,
    )
    return configure(OrchestratorDeployment).bind(dict(settings), probe_key_sha256, local_only)


def orchestrator(args: dict[str, Any]) -> Any:
    given = OrchestratorArguments(**args)
    OrchestratorSettings(**given.settings)  # fails here: a replica would only log the error
    given.wait()
    return build(given.settings, given.replicas, given.scaling)
