"""A Ray node whose applications come from source trees of different versions, in a process of its own.

`python -m tests.support.cluster.served_versions REDIS_URL` prints `ready HTTP_ADDRESS GRPC_ADDRESS`, then
deploys what each line of its input says, a JSON object of source trees by role, and says `deployed` once it
runs. As KubeRay does, it hands Serve a configuration, which replaces the replicas whose tree changed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from gammaray.demo_pair import resolve_model
from gammaray.deploy.serve_config import APPLICATIONS, GRPC_SERVICERS
from orchestrator.launcher.cluster import private_directory, serve_environment
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.reaper import MARK, Guardian, die_with_parent
from tests.support.cluster.ray_start import patiently

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
REPLICAS = 2
WORKERS: dict[str, dict[str, Any]] = {
    role: {
        "listen": f"{HOST}:0",
        "model": resolve_model("demo", role),
        "metrics_listen": "",
        "deterministic": True,
    }
    for role in ("draft", "target")
}


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with ExitStack() as started:
        directory = private_directory()
        started.callback(Guardian(directory.name, directory).dismiss)
        os.environ.update({MARK: directory.name, **serve_environment(directory, HOST)})
        os.chdir(directory)  # Ray puts the current directory before the trees
        start_ray(directory, started)
        http_port, grpc_port = free_ports(HOST, 2)
        print(f"ready {HOST}:{http_port} {HOST}:{grpc_port}", file=answers, flush=True)
        for line in sys.stdin:
            deploy(configuration(json.loads(line), sys.argv[1], http_port, grpc_port), directory)
            print("deployed", file=answers, flush=True)


def start_ray(directory: Path, started: ExitStack) -> None:
    import ray
    from ray import serve

    started.callback(ray.shutdown)
    resources = {application.resource: REPLICAS + 1 for application in APPLICATIONS.values()}
    patiently(
        lambda: ray.init(
            address="local",
            num_cpus=1,
            resources=resources,
            object_store_memory=80 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(directory / "ray"),
            _node_ip_address=HOST,
        ),
        directory.name,
    )
    started.callback(serve.shutdown)


def configuration(trees: dict[str, str], redis_url: str, http_port: int, grpc_port: int) -> dict[str, Any]:
    applications = []
    for role, tree in trees.items():
        settings = {"redis_url": redis_url, **WORKERS.get(role, {})}
        count = "workers" if role in WORKERS else "replicas"
        per_node = {"name": APPLICATIONS[role].deployment, "max_replicas_per_node": REPLICAS + 1}
        applications.append(
            {
                "name": APPLICATIONS[role].name,
                "route_prefix": None if role in WORKERS else "/",
                "import_path": APPLICATIONS[role].import_path,
                "args": {"settings": settings, count: REPLICAS},
                "deployments": [per_node] if role in WORKERS else [],
                "runtime_env": {"env_vars": {"PYTHONPATH": tree}},
            }
        )
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": HOST, "port": http_port},
        "grpc_options": {"port": grpc_port, "grpc_servicer_functions": list(GRPC_SERVICERS)},
        "applications": applications,
    }


def deploy(config: dict[str, Any], directory: Path) -> None:
    """Hand a configuration to Serve, and wait until all of it runs."""
    from ray import serve
    from ray.serve.scripts import cli

    file = directory / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    cli.main(["run", "--non-blocking", str(file)], standalone_mode=False)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _runs(serve.status().applications):
        if time.monotonic() > deadline:
            raise SystemExit(f"it does not serve: {serve.status().applications}")
        time.sleep(0.2)


def _runs(applications: dict[str, Any]) -> bool:
    """Whether all applications run, and all replicas are of their latest configuration."""
    if failed := [app.message for app in applications.values() if app.status == "DEPLOY_FAILED"]:
        raise SystemExit(f"it does not serve: {failed}")
    return all(
        app.status == "RUNNING" and all(one.status == "HEALTHY" for one in app.deployments.values())
        for app in applications.values()
    )


if __name__ == "__main__":
    main()
