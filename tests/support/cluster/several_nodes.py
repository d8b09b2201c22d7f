"""Five emulated nodes on this machine, in a process of its own.

A head for the orchestrator, two nodes of small GPUs for drafters, two of large ones for targets; the GPUs are
custom resources. Deploys all roles, prints `ready GRPC_ADDRESS`, and answers each line of its input with the
nodes of each role's running replicas, as JSON; `kill NODE` ends a node before, as a power cut would.
"""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gammaray.config import OrchestratorSettings
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.redis_server import RedisServer
from tests.support.cluster.ray_start import HOST, patiently, private_place

MEMORY = 80 * 2**20
NODE_START_TIMEOUT_S = 180
NODES = {
    "small-a": {"small_gpu": 2},
    "small-b": {"small_gpu": 1},
    "large-a": {"large_gpu": 1},
    "large-b": {"large_gpu": 1},
}
SCALING = {"draft_load": 1.0}
DRAFT_WORKERS = "1:3"
DELAYS = {"SCALE_UP_DELAY_S": 0.5, "SCALE_DOWN_DELAY_S": 1.0, "REPORT_INTERVAL_S": 0.3}
"""Constants of `gammaray.deploy.serve_config`."""

WORKER_WAIT_S = 240.0
"""Seconds that a request waits for a target worker: with few cores a start takes longer than 30 s."""


def main() -> None:
    with private_place() as (directory, answer, started):
        # With HAProxy replicas have ports of their own, handed out node by node: on one machine they collide.
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
        # cluster_utils writes the head's address to Ray's default directory and does not create it.
        os.environ["RAY_TMPDIR"] = str(directory)
        (directory / "ray").mkdir()
        nodes, cluster = start_nodes(directory, started)
        address = start_serve(started)
        deploy(started.enter_context(RedisServer.start(directory / "redis")).url)
        answer(f"ready {address}")
        for line in sys.stdin:
            command, _, name = line.strip().partition(" ")
            if command == "kill":
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            answer(json.dumps(placement({node.node_id: name for name, node in nodes.items()})))


def start_nodes(directory: Path, started: ExitStack) -> tuple[dict[str, Any], Any]:
    import ray
    from ray.cluster_utils import Cluster

    # Each node has a loopback address of its own, and not 127.0.0.1: Ray would take the machine's for that.
    own = {"node_ip_address": "127.0.0.2", "temp_dir": str(directory / "ray"), "resources": {"head": 1}}
    head = {**own, "object_store_memory": MEMORY, "include_dashboard": False}

    def start() -> tuple[dict[str, Any], Any]:
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = {"head": cluster.head_node}
        for number, (name, has) in enumerate(NODES.items(), start=3):
            place = {"node_ip_address": f"127.0.0.{number}", "object_store_memory": MEMORY}
            nodes[name] = cluster.add_node(wait=False, resources=has, **place)
        cluster.wait_for_nodes(NODE_START_TIMEOUT_S)
        return nodes, cluster

    nodes, cluster = patiently(start, directory.name)
    started.callback(cluster.shutdown)
    ray.init(address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    started.callback(ray.shutdown)
    return nodes, cluster


def start_serve(started: ExitStack) -> str:
    from ray import serve

    from gammaray.deploy.serve_config import GRPC_SERVICERS

    http_port, grpc_port = free_ports(HOST, 2)
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": HOST, "port": http_port},
        grpc_options={"port": grpc_port, "grpc_servicer_functions": list(GRPC_SERVICERS)},
    )
    started.callback(serve.shutdown)
    return f"{HOST}:{grpc_port}"


def patient_orchestrator() -> type:
    """Return the deployment's class with a longer `WORKER_WAIT_S`; pickled by value for its replicas."""
    from orchestrator.app import OrchestratorDeployment

    class Patient(OrchestratorDeployment):
        async def __init__(self, settings: dict[str, Any]) -> None:
            from orchestrator import service

            service.WORKER_WAIT_S = WORKER_WAIT_S
            await super().__init__(settings)

    return Patient


def deploy(redis_url: str) -> None:
    """Deploy all roles, each to its nodes, and wait until they run."""
    from ray import serve

    from gammaray.deploy.serve_config import APPLICATIONS
    from services.serve.app import build

    worker = {"redis_url": redis_url, "device": "cpu"}
    # Without draft-ahead load is what is asked for, and not what is foreseen.
    drafter = {**worker, "draft_ahead": False}
    settings = OrchestratorSettings(redis_url=redis_url)
    orchestrator = serve.deployment(
        name="Orchestrator",
        max_ongoing_requests=100,
        ray_actor_options={"num_cpus": 0, "resources": {"head": 1}},
    )(patient_orchestrator())
    small, large = ({"resources": {kind: 1}} for kind in ("small_gpu", "large_gpu"))
    with patch.multiple("gammaray.deploy.serve_config", **DELAYS):
        target_workers = build("target", worker, 2, large, SCALING)
        draft_workers = build("draft", drafter, DRAFT_WORKERS, small, SCALING)
    targets = [
        serve.RunTarget(target_workers, APPLICATIONS["target"].name, None),
        serve.RunTarget(draft_workers, APPLICATIONS["draft"].name, None),
        serve.RunTarget(
            orchestrator.bind(settings.model_dump(mode="json")), APPLICATIONS["orchestrator"].name, "/"
        ),
    ]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False)


def placement(names: dict[str, str]) -> dict[str, list[str]]:
    import ray
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=30)  # noqa: SLF001
    return {
        name: sorted(
            names.get(replica["node_id"], "gone")
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        )
        for application in details["applications"].values()
        for name, deployment in application["deployments"].items()
    }


if __name__ == "__main__":
    main()
