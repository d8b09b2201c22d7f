"""Draft and target workers as Ray Serve deployments, and the application builders for a Serve config."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Coroutine
from dataclasses import asdict
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import ray.util
from ray import serve

from gammaray.checks import split_address
from gammaray.config import PoolSize, ScalingSettings, WorkerSettings
from gammaray.deploy.serve_config import APPLICATIONS, WorkerArguments, autoscaling_config, log_with_serve
from gammaray.engines import health_timeout_s
from gammaray.errors import InvalidArgumentError
from services.process.server import DRAIN_TIMEOUT_S

if TYPE_CHECKING:
    from services.process.worker import Worker

_SHUTDOWN_MARGIN_S = 5.0  # for the replica to exit after the worker has drained
# Imported by the replicas only, since they load torch.
_WORKERS = {
    "draft": "services.draft_worker.worker:DraftWorker",
    "target": "services.target_worker.worker:TargetWorker",
}

_log = logging.getLogger("ray.serve")  # Ray writes this logger to a replica's log


class WorkerReplica:
    """Hosts a worker in a Serve replica, pinned to some CPU cores if any are named."""

    # Serve awaits the constructor; mypy expects one that returns None.
    async def __init__(  # type: ignore[misc]
        self, role: str, settings: WorkerSettings, cores: Collection[int] = ()
    ) -> None:
        log_with_serve()
        if cores:
            bind_cores(cores)
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # ray has no types here
        self.worker: Worker[Any] = resolve_name(_WORKERS[role])(settings, here)
        try:
            await self.worker.start()
        except BaseException:
            await self.worker.stop()
            raise
        _log.info("%s worker at %s, kernel: %s", role, self.worker.address, self.worker.kernel)

    async def check_health(self) -> None:
        """Raise when the replica must be replaced; called by Serve."""
        self.worker.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load since the last call; called by Serve when the pool autoscales."""
        return asdict(await self.worker.load())

    def __del__(self) -> Coroutine[Any, Any, bool] | None:
        """Drain; Serve awaits the result. Python may call this again, and then it does nothing."""
        worker: Worker[Any] | None = self.__dict__.pop("worker", None)
        return None if worker is None else worker.stop()


def bind_cores(cores: Collection[int]) -> None:
    """Pin all threads of this process to CPU cores."""
    # Affinity is per thread, and threads of Ray or gRPC may already run.
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def build(
    role: str,
    settings: dict[str, Any],
    num_replicas: int | str | PoolSize = 1,
    ray_actor_options: dict[str, Any] | None = None,
    scaling: dict[str, Any] | None = None,
    one_per_node: bool = False,
    cores: Collection[int] = (),
) -> serve.Application:
    """Return the application that runs the workers of a role.

    Args:
        settings: Fields of DraftSettings or TargetSettings; others come from the environment or the defaults.
        num_replicas: Number of workers, N or MIN:MAX.
        ray_actor_options: Resources of each worker; by default 0 CPUs, so that any machine fits.
        scaling: Fields of ScalingSettings for autoscaling between the bounds. None: autoscale only if the
            bounds differ, with the defaults.
        one_per_node: Never put two workers on one Ray node, so that all can listen on the same port.
        cores: CPU cores that each worker's process is pinned to; empty: none.
    """
    application, size = APPLICATIONS[role], PoolSize.parse(num_replicas)
    checked = application.settings(**settings)
    assert isinstance(checked, WorkerSettings)
    _, port = split_address("listen", checked.listen)
    if port and size.maximum > 1 and not one_per_node:
        raise InvalidArgumentError("listen", checked.listen, f"port 0 with {size} workers")
    count: dict[str, Any] = {"num_replicas": size.minimum}
    if scaling is not None or size.is_elastic:
        count = {"autoscaling_config": autoscaling_config(role, size, ScalingSettings(**(scaling or {})))}
    if one_per_node:
        count["max_replicas_per_node"] = 1
    has_gpu = bool((ray_actor_options or {}).get("num_gpus"))
    make_deployment = serve.deployment(
        name=application.deployment,
        ray_actor_options={"num_cpus": 0, **(ray_actor_options or {})},
        health_check_period_s=2.0,
        # After three late checks in a row Serve replaces a replica; one whose process has ended at once.
        # Orchestrators leave a worker that does not answer long before.
        health_check_timeout_s=health_timeout_s(checked.engine, has_gpu=has_gpu),
        # Requests do not pass through Serve: the worker itself waits for its blocks.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=DRAIN_TIMEOUT_S + _SHUTDOWN_MARGIN_S,
        **count,
    )
    return make_deployment(WorkerReplica).bind(role, checked, tuple(cores))


def draft(args: dict[str, Any]) -> Any:
    """Return the application of draft workers, as a Serve configuration names it."""
    return _configured("draft", args)


def target(args: dict[str, Any]) -> Any:
    """Return the application of target workers, as a Serve configuration names it."""
    return _configured("target", args)


def _configured(role: str, args: dict[str, Any]) -> serve.Application:
    pool = WorkerArguments(**args)
    pool.wait()
    return build(role, pool.settings, pool.workers, scaling=pool.scaling, one_per_node=True)
