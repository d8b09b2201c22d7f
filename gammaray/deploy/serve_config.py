"""The Ray Serve applications of a cluster: names, builders, settings, environment and autoscaling options.

The launcher and the Helm chart both use it, so that they deploy the same applications. For nodes that are
started by hand, `eval "$(python -m gammaray.deploy.serve_config)"` sets the environment.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gammaray.config import (
    ClusterSettings,
    DraftSettings,
    OrchestratorSettings,
    PoolSize,
    ScalingSettings,
    TargetSettings,
    WorkerSettings,
    at_least_one,
    parse_adapters,
)
from gammaray.errors import UnavailableError
from gammaray.wire.metadata import APPLICATION

_POLICIES = {
    "draft": "services.serve.policy:DraftPolicy",
    "orchestrator": "orchestrator.scaling_policy:OrchestratorPolicy",
    "target": "services.serve.policy:TargetPolicy",
}
REPORT_INTERVAL_S, _NUM_REPORTS = 1.0, 10
"""Seconds between load reports of a replica, and how many of them a scaling decision considers."""

SCALE_UP_DELAY_S, SCALE_DOWN_DELAY_S = 3.0, 60.0
"""Seconds that more or fewer replicas must be wanted before Serve acts: one too few delays requests, one too
many only costs, and a new one may load its model for minutes."""

SHRINK_MARGIN = 0.7
"""A replica is removed only if the load per remaining one is at most this share of the wanted load."""

_AFTER_TIMEOUT_S, _AFTER_POLL_S = 24 * 3600.0, 2.0

GRPC_SERVICERS: Final = ("orchestrator.api.grpc_handlers.add_generation_service",)
"""Servicers that Serve's gRPC options must name to expose the public API."""

WORKER_PORT: Final = 50051
"""Port of a worker's gRPC server if each worker has its own network address, as in a pod."""

SERVE_ENVIRONMENT: Final[Mapping[str, str]] = {
    # Serve's own proxy costs several times as much per message.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    # A proxy that is not ready within three times this is killed, and the start of the cluster fails; the
    # default of 5 s is too short on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "3",
    # If enabled, the third connection refused by a dead replica marks it as down and waits for one second
    # before it is redirected. If disabled, all are redirected immediately, until Serve removes the replica.
    "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
    # HAProxy that splices a body of more than 16 KiB does not notice that the client leaves while it waits
    # for the response. Serve has no setting for the option; this one is written into the same section.
    "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": "leastconn\n    no option splice-request",
    # One event loop per replica: with a second one each cycle takes some 5 to 12 % longer (the GIL).
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Ray's default niceness of 15 gives workers a lower CPU priority than all other processes.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Upper bound of a public gRPC message; with the default of 2 GiB one request could exhaust memory.
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(16 * 2**20),
    # See services/__init__.py: fewer threads per message.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
"""Variables that every process of every Ray node must have before Ray and gRPC are imported."""


def autoscaling_config(role: str, size: PoolSize, settings: ScalingSettings) -> dict[str, Any]:
    """Return the `autoscaling_config` of a role's deployment, as JSON values.

    If both bounds of its size are equal, the pool reports its load and keeps its size.
    """
    return {
        "min_replicas": size.minimum,
        # A pool with minimum 0 starts with one replica, to measure whether drafting pays.
        "initial_replicas": max(1, size.minimum),
        "max_replicas": size.maximum,
        "metrics_interval_s": REPORT_INTERVAL_S,
        "look_back_period_s": _NUM_REPORTS * REPORT_INTERVAL_S,
        "upscale_delay_s": SCALE_UP_DELAY_S,
        "downscale_delay_s": SCALE_DOWN_DELAY_S,
        "policy": {
            "policy_function": _POLICIES[role],
            "policy_kwargs": {"settings": settings.model_dump(mode="json")},
        },
    }


def log_with_serve() -> None:
    """Let all loggers write to the replica's log, with levels, instead of to stderr."""
    for handler in logging.getLogger("ray.serve").handlers:
        logging.getLogger().addHandler(handler)


@dataclass(frozen=True)
class ServeApplication:
    role: str
    name: str  # in Serve
    deployment: str  # name of its one deployment
    import_path: str  # `module:function` that builds it from its settings, for a Serve configuration
    settings: type[OrchestratorSettings] | type[WorkerSettings]
    route_prefix: str | None = None  # of its HTTP API; None if it has none

    @property
    def resource(self) -> str:
        """Logical Ray resource: each node for this role has one, and each replica takes one."""
        return f"gammaray_{self.role}"


_TARGET = f"{APPLICATION}-target", "TargetWorker", "services.serve.app:target"
_DRAFT = f"{APPLICATION}-draft", "DraftWorker", "services.serve.app:draft"
_ORCHESTRATOR = APPLICATION, "Orchestrator", "orchestrator.app:orchestrator"
APPLICATIONS: Final[Mapping[str, ServeApplication]] = {
    "target": ServeApplication("target", *_TARGET, TargetSettings),
    "draft": ServeApplication("draft", *_DRAFT, DraftSettings),
    "orchestrator": ServeApplication("orchestrator", *_ORCHESTRATOR, OrchestratorSettings, "/"),
}
"""Every application by role, in start order."""


class _Arguments(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: dict[str, Any] = Field(description="Fields of the role's settings.")
    scaling: dict[str, Any] | None = Field(None, description="Fields of ScalingSettings; None: the defaults.")
    after: tuple[Path, ...] = Field((), description="Files to wait for, which mark models as downloaded.")

    def wait(self) -> None:
        """Wait for the files of `after`; meanwhile Serve keeps the replicas of the previous configuration.

        Raises:
            UnavailableError: A file is missing after a day.
        """
        deadline = time.monotonic() + _AFTER_TIMEOUT_S
        while missing := [str(path) for path in self.after if not path.exists()]:
            if time.monotonic() > deadline:
                raise UnavailableError(f"model not downloaded within a day: {missing[0]} is missing")
            time.sleep(_AFTER_POLL_S)


class WorkerArguments(_Arguments):
    """Arguments of a worker pool's application in a Serve configuration."""

    workers: PoolSize = Field(
        "1", validate_default=True, description="Number of workers, N or MIN:MAX to scale between."
    )


class OrchestratorArguments(_Arguments):
    """Arguments of the orchestrator's application in a Serve configuration."""

    replicas: Annotated[PoolSize, AfterValidator(at_least_one)] = Field(
        "1", validate_default=True, description="Number of orchestrators, N or MIN:MAX to scale between."
    )


def role_settings(cluster: ClusterSettings) -> dict[str, dict[str, Any]]:
    """Return what a cluster's settings determine per role; the rest is left to environment and defaults."""
    worker: dict[str, Any] = {"engine": cluster.engine, "device": cluster.device, "dtype": cluster.dtype}
    learning = {"learn": str(Path(cluster.learn).absolute())} if cluster.learn else {}
    return {
        "target": {
            "model": cluster.target,
            "deterministic": cluster.deterministic,
            "tensor_parallel": cluster.tensor_parallel,
            **({"lora": _absolute_adapters(cluster.lora)} if cluster.lora else {}),
            "head": cluster.head,
            **({"draft_weights": cluster.draft_weights, **learning} if cluster.head else {}),
            **worker,
        },
        "draft": {
            "model": cluster.draft,
            "draft_weights": cluster.draft_weights,
            **worker,
            **({} if cluster.draft == cluster.target else {"target": cluster.target}),
        },
        "orchestrator": {"model": cluster.target},
    }


def _absolute_adapters(lora: str) -> str:
    """Return adapters with absolute directories, as workers run elsewhere; names of the hub stay."""
    found = parse_adapters(lora)
    return ",".join(
        f"{name}={Path(at).absolute() if Path(at).exists() else at}" for name, at in found.items()
    )


if __name__ == "__main__":
    for variable, value in SERVE_ENVIRONMENT.items():
        print(f"export {variable}={shlex.quote(value)}")
