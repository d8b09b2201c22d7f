"""Draft and target workers as Ray Serve deployments.

Ray places, restarts and counts the replicas; it is not on the way of a block. Each replica hosts the same
gRPC server and engine as the standalone worker, and orchestrators dial it directly, by its entry in the
registry.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import ray.util
from ray import serve

from gammaray.config import DraftSettings, TargetSettings, WorkerSettings
from gammaray.errors import InvalidArgumentError
from services.server import is_wildcard, split_address

__all__ = ["build_draft", "build_target"]

# Room for the replica's own end after the worker has drained.
_SHUTDOWN_MARGIN_S = 5.0


class _Replica:
    """Hosts a worker in a Serve replica.

    Args:
        settings: What to serve and where.
    """

    async def __init__(self, settings: WorkerSettings) -> None:
        host, _ = split_address("listen", settings.listen)
        if is_wildcard(host) and not settings.advertise:
            # Port 0 stands for the one that will be bound.
            settings = settings.model_copy(update={"advertise": f"{ray.util.get_node_ip_address()}:0"})
        self._worker: Any = self._make_worker(settings)
        try:
            await self._worker.start()
        except BaseException:
            await self._worker.stop()
            raise

    def _make_worker(self, settings: Any) -> Any:
        raise NotImplementedError

    async def address(self) -> str:
        """Return the host:port that is served."""
        return str(self._worker.address)

    async def check_health(self) -> None:
        """Raise when the replica must be replaced; called by Serve."""
        self._worker.check()

    def __del__(self) -> Coroutine[Any, Any, bool] | None:
        """Drain; Serve awaits what this returns. Python itself may call it again, and then it is over."""
        worker, self._worker = getattr(self, "_worker", None), None
        return None if worker is None else worker.stop()


class DraftWorkerReplica(_Replica):
    """A draft worker."""

    def _make_worker(self, settings: DraftSettings) -> Any:
        from services.draft.worker import DraftWorker

        return DraftWorker(settings)


class TargetWorkerReplica(_Replica):
    """A target worker."""

    def _make_worker(self, settings: TargetSettings) -> Any:
        from services.target.worker import TargetWorker

        return TargetWorker(settings)


def build_draft(
    settings: dict[str, Any], num_replicas: int = 1, ray_actor_options: dict[str, Any] | None = None
) -> serve.Application:
    """Return the application that runs draft workers.

    Args:
        settings: Fields of DraftSettings; what is missing comes from the environment or the defaults.
        num_replicas: Number of workers.
        ray_actor_options: Resources of each, beside no CPU share: by default any machine will do.

    Raises:
        pydantic.ValidationError: A bad setting.
        InvalidArgumentError: Several workers on one port.
    """
    return _build(
        "DraftWorker", DraftWorkerReplica, DraftSettings(**settings), num_replicas, ray_actor_options
    )


def build_target(
    settings: dict[str, Any], num_replicas: int = 1, ray_actor_options: dict[str, Any] | None = None
) -> serve.Application:
    """Return the application that runs target workers.

    Args:
        settings: Fields of TargetSettings; what is missing comes from the environment or the defaults.
        num_replicas: Number of workers.
        ray_actor_options: Resources of each, beside no CPU share: by default any machine will do.

    Raises:
        pydantic.ValidationError: A bad setting.
        InvalidArgumentError: Several workers on one port.
    """
    return _build(
        "TargetWorker", TargetWorkerReplica, TargetSettings(**settings), num_replicas, ray_actor_options
    )


def _build(
    name: str,
    replica: type[_Replica],
    settings: WorkerSettings,
    num_replicas: int,
    ray_actor_options: dict[str, Any] | None,
) -> serve.Application:
    _, port = split_address("listen", settings.listen)
    if port and num_replicas > 1:
        raise InvalidArgumentError("listen", settings.listen, f"port 0 with {num_replicas} workers")
    deployment = serve.deployment(
        replica,
        name=name,
        num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0, **(ray_actor_options or {})},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        # No request ever comes through Serve: the worker itself waits for its blocks.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
    )
    return deployment.bind(settings)
