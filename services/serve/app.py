"""Draft and target workers as Ray Serve deployments, and the application builders for a Serve config."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray.util
from ray import serve

from gammaray.config import DraftSettings, PoolSize, ScalingSettings, TargetSettings, WorkerSettings
from gammaray.deploy.effective import WorkerArguments
from gammaray.deploy.serve_config import autoscaling_config
from gammaray.errors import InvalidArgumentError
from services.process.server import is_wildcard, split_address

if TYPE_CHECKING:
    from services.process.worker import Worker

__all__ = [
    "build_draft",
    "build_target",
    "draft",
    "target",
]

_log = logging.getLogger("ray.serve")  # Ray writes this logger to a replica's log
# Time for the replica to exit after the worker has drained.
_SHUTDOWN_MARGIN_S = 5.0
_DEPLOYMENTS = {"draft": "DraftWorker", "target": "TargetWorker"}


SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


class _Replica(Generic[SettingsT]):
    """Hosts a worker in a Serve replica.

    Args:
        settings: What to serve and where.

    Attributes:
        worker: The worker; the attribute is deleted when the worker is stopped.
    """

    # Serve awaits the constructor; mypy expects one that returns None.
    async def __init__(self, settings: SettingsT) -> None:  # type: ignore[misc]
        host, _ = split_address("listen", settings.listen)
        if is_wildcard(host) and not settings.advertise:
            # Port 0 is replaced with the port that is bound.
            here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # ray has no types here
            settings = settings.model_copy(update={"advertise": f"{here}:0"})
        self.worker: Worker[SettingsT] = self._make_worker(settings)
        try:
            await self.worker.start()
        except BaseException:
            await self.worker.stop()
            raise
        _log.info("%s worker at %s, kernel: %s", self.worker.role, self.worker.address, self.worker.kernel)

    def _make_worker(self, settings: SettingsT) -> Worker[SettingsT]:
        raise NotImplementedError

    async def address(self) -> str:
        """Return the worker's host:port."""
        return self.worker.address

    async def check_health(self) -> None:
        """Raise when the replica must be replaced; called by Serve."""
        self.worker.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load since the last call; called by Serve when the pool autoscales."""
        return (await self.worker.load()).as_metrics()

    def __del__(self) -> Coroutine[Any, Any, bool] | None:
        """Drain; Serve awaits the result. Python may call this again, and then it does nothing."""
        worker: Worker[SettingsT] | None = self.__dict__.pop("worker", None)
        return None if worker is None else worker.stop()


class DraftWorkerReplica(_Replica[DraftSettings]):
    """A draft worker."""

    def _make_worker(self, settings: DraftSettings) -> Worker[DraftSettings]:
        from services.draft.worker import DraftWorker

        return DraftWorker(settings)


class TargetWorkerReplica(_Replica[TargetSettings]):
    """A target worker."""

    def _make_worker(self, settings: TargetSettings) -> Worker[TargetSettings]:
        from services.target.worker import TargetWorker

        return TargetWorker(settings)


def build_draft(
    settings: dict[str, Any],
    num_replicas: int | str | PoolSize = 1,
    ray_actor_options: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    one_per_node: bool = False,
) -> serve.Application:
    """Return the application that runs draft workers.

    Args:
        settings: Fields of DraftSettings; what is missing comes from the environment or the defaults.
        num_replicas: Number of workers, N or MIN:MAX.
        ray_actor_options: Resources of each worker; by default 0 CPUs, so that any machine fits.
        scaling: Fields of ScalingSettings for autoscaling between the bounds. None: autoscale only if the
            bounds differ, with the defaults.
        one_per_node: Never put two workers on one Ray node, so that all can listen on the same port.

    Raises:
        pydantic.ValidationError: A bad setting.
        ValueError: A bad number of workers.
        InvalidArgumentError: Several workers on one port.
    """
    size = PoolSize.parse(num_replicas)
    return _build(
        "draft", DraftWorkerReplica, DraftSettings(**settings), size, ray_actor_options, scaling, one_per_node
    )


def build_target(
    settings: dict[str, Any],
    num_replicas: int | str | PoolSize = 1,
    ray_actor_options: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    one_per_node: bool = False,
) -> serve.Application:
    """Return the application that runs target workers.

    Args:
        settings: Fields of TargetSettings; what is missing comes from the environment or the defaults.
        num_replicas: Number of workers, N or MIN:MAX.
        ray_actor_options: Resources of each worker; by default 0 CPUs, so that any machine fits.
        scaling: Fields of ScalingSettings for autoscaling between the bounds. None: autoscale only if the
            bounds differ, with the defaults.
        one_per_node: Never put two workers on one Ray node, so that all can listen on the same port.

    Raises:
        pydantic.ValidationError: A bad setting.
        ValueError: A bad number of workers.
        InvalidArgumentError: Several workers on one port.
    """
    size = PoolSize.parse(num_replicas)
    return _build(
        "target",
        TargetWorkerReplica,
        TargetSettings(**settings),
        size,
        ray_actor_options,
        scaling,
        one_per_node,
    )


def _build(
    role: str,
    replica: type[_Replica[SettingsT]],
    settings: SettingsT,
    size: PoolSize,
    ray_actor_options: dict[str, Any] | None,
    scaling: dict[str, Any] | None,
    one_per_node: bool,
) -> serve.Application:
    _, port = split_address("listen", settings.listen)
    if port and size.maximum > 1 and not one_per_node:
        raise InvalidArgumentError("listen", settings.listen, f"port 0 with {size} workers")
    count: dict[str, Any] = {"num_replicas": size.minimum}
    if scaling is not None or size.is_elastic:
        count = {"autoscaling_config": autoscaling_config(role, size, ScalingSettings(**(scaling or {})))}
    if one_per_node:
        count["max_replicas_per_node"] = 1
    make_deployment = serve.deployment(
        name=_DEPLOYMENTS[role],
        ray_actor_options={"num_cpus": 0, **(ray_actor_options or {})},
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        # Requests do not pass through Serve: the worker itself waits for its blocks.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.drain_timeout_s + _SHUTDOWN_MARGIN_S,
        **count,
    )
    return make_deployment(replica).bind(settings)


def draft(args: dict[str, Any]) -> Any:
    """Return the application of draft workers.

    Raises:
        pydantic.ValidationError: A bad argument or setting.
    """
    given = WorkerArguments(**args)
    return build_draft(given.settings, given.workers, scaling=given.scaling, one_per_node=True)


def target(args: dict[str, Any]) -> Any:
    """Return the application of target workers.

    Raises:
        pydantic.ValidationError: A bad argument or setting.
    """
    given = WorkerArguments(**args)
    return build_target(given.settings, given.workers, scaling=given.scaling, one_per_node=True)
