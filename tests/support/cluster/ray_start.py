"""Starts of Ray on a machine that may be busy."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gammaray.deploy.serve_config import APPLICATIONS
from gammaray.program.parents import end_with_parent
from orchestrator.launcher.cluster import private_directory, serve_environment
from orchestrator.launcher.reaper import MARK, Guardian, end_marked

HOST = "127.0.0.1"
NUM_TRIES = 4
START_TIMEOUT_S = 300.0
T = TypeVar("T")


def patiently(start: Callable[[], T], cluster_id: str) -> T:
    """Return what `start` does, tried again as by the launcher: Ray gives up after 30 s, be it only late."""
    for _ in range(NUM_TRIES - 1):
        try:
            return start()
        except Exception:
            end_marked(cluster_id)
    return start()


@contextmanager
def private_place() -> Iterator[tuple[Path, Callable[[str], None], ExitStack]]:
    """End with the parent, and give a directory, a way to answer, and what to end in the end.

    Standard output is for answers only: what else is printed goes to standard error.
    """
    end_with_parent(signal.SIGTERM)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with ExitStack() as started:
        directory = private_directory()
        started.callback(Guardian(directory.name, directory).dismiss)
        os.environ.update({MARK: directory.name, **serve_environment(directory, HOST)})
        yield directory, partial(print, file=answers, flush=True), started


def start_node(directory: Path, started: ExitStack, count: int) -> None:
    """Start a Ray node with so many of each logical resource."""
    import ray
    from ray import serve

    started.callback(ray.shutdown)
    resources = {application.resource: count for application in APPLICATIONS.values()}
    size = {"num_cpus": 1, "resources": resources, "object_store_memory": 80 * 2**20}
    place = {"address": "local", "_temp_dir": str(directory / "ray"), "_node_ip_address": HOST}
    start = partial(ray.init, **place, **size, include_dashboard=False, log_to_driver=False)
    patiently(start, directory.name)
    started.callback(serve.shutdown)


def deploy(config: dict[str, Any], directory: Path) -> None:
    """Hand a configuration to Serve as `serve run` does, and wait until all replicas are of it."""
    from ray import serve
    from ray.serve.scripts import cli

    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    cli.main(["run", "--non-blocking", str(file)], standalone_mode=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _runs(found := serve.status().applications):
        if time.monotonic() > deadline or any(app.status == "DEPLOY_FAILED" for app in found.values()):
            raise SystemExit(f"it does not serve: {found}")
        time.sleep(0.2)


def _runs(applications: dict[str, Any]) -> bool:
    return all(
        app.status == "RUNNING" and all(one.status == "HEALTHY" for one in app.deployments.values())
        for app in applications.values()
    )
