"""A Ray node whose applications come from source trees of different versions, in a process of its own.

`python -m tests.support.cluster.served_versions REDIS_URL` prints `ready HTTP_ADDRESS GRPC_ADDRESS`, then
deploys what each line of its input says, a JSON object of source trees by role, and says `deployed` once it
runs. As KubeRay does, it hands Serve a configuration, which replaces the replicas whose tree changed.
"""

import json
import os
import sys
from typing import Any

from gammaray.demo_pair import resolve_model
from gammaray.deploy.serve_config import APPLICATIONS, GRPC_SERVICERS
from orchestrator.launcher.preflight import free_ports
from tests.support.cluster.ray_start import HOST, deploy, private_place, start_node

REPLICAS = 2
OWN = {"listen": f"{HOST}:0", "metrics_listen": "", "deterministic": True}
WORKERS = {role: {**OWN, "model": resolve_model("demo", role)} for role in ("draft", "target")}


def main() -> None:
    with private_place() as (directory, answer, started):
        os.chdir(directory)  # Ray puts the current directory before the trees
        start_node(directory, started, REPLICAS + 1)
        http_port, grpc_port = free_ports(HOST, 2)
        answer(f"ready {HOST}:{http_port} {HOST}:{grpc_port}")
        for line in sys.stdin:
            deploy(configuration(json.loads(line), sys.argv[1], http_port, grpc_port), directory)
            answer("deployed")


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


if __name__ == "__main__":
    main()
