"""A Ray node that serves the chart's own Serve configuration, in a process of its own.

`python -m tests.support.cluster.served_chart FILE` deploys it by `serve run`, as docs/install.md does without
Helm: that hands the document to Serve's controller, as KubeRay does. One node has the logical resources of
every role, for two of each. Prints `ready HTTP_ADDRESS GRPC_ADDRESS`, serves until standard input ends.

Of the configuration only what pods have to themselves is changed: addresses and ports.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import yaml

from gammaray.deploy.serve_config import APPLICATIONS
from orchestrator.launcher.cluster import private_directory, serve_environment
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.reaper import MARK, Guardian, die_with_parent
from orchestrator.launcher.redis_server import RedisServer
from tests.support.cluster.ray_start import patiently

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    with ExitStack() as started:
        directory = private_directory()
        started.callback(Guardian(directory.name, directory).dismiss)
        redis = started.enter_context(RedisServer.start(directory / "redis"))
        environment = {MARK: directory.name, **serve_environment(directory, HOST)}
        os.environ.update({**environment, **redis_environment(redis.url)})
        http_port, grpc_port = free_ports(HOST, 2)
        deploy(on_one_machine(config, http_port, grpc_port), directory, started)
        print(f"ready {HOST}:{http_port} {HOST}:{grpc_port}", file=answers, flush=True)
        sys.stdin.read()


def redis_environment(url: str) -> dict[str, str]:
    """Return the environment for Redis as in the chart: the password separate from the URL."""
    parts = urlsplit(url)
    assert parts.password is not None
    address = urlunsplit(parts._replace(netloc=f"{parts.hostname}:{parts.port}"))
    return {"GAMMARAY_REDIS_URL": address, "GAMMARAY_REDIS_PASSWORD": parts.password}


def on_one_machine(config: dict[str, Any], http_port: int, grpc_port: int) -> dict[str, Any]:
    config["http_options"] = {"host": HOST, "port": http_port}
    config["grpc_options"]["port"] = grpc_port
    for application in config["applications"]:
        settings = application["args"]["settings"]
        settings["metrics_listen"] = ""
        if "listen" in settings:
            settings["listen"] = f"{HOST}:0"
    return config


def deploy(config: dict[str, Any], directory: Path, started: ExitStack) -> None:
    """Start Ray with two of each logical resource, deploy the configuration, wait until it serves."""
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    started.callback(ray.shutdown)
    start = partial(
        ray.init,
        address="local",
        num_cpus=1,
        resources={application.resource: 2 for application in APPLICATIONS.values()},
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(directory / "ray"),
        _node_ip_address=HOST,
    )
    patiently(start, directory.name)
    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    started.callback(serve.shutdown)
    cli.main(["run", "--non-blocking", str(file)], standalone_mode=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while (states := {app.status for app in serve.status().applications.values()}) != {"RUNNING"}:
        if "DEPLOY_FAILED" in states or time.monotonic() > deadline:
            raise SystemExit(f"it does not serve: {serve.status().applications}")
        time.sleep(0.2)


if __name__ == "__main__":
    main()
