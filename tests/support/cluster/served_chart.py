"""A Ray node that serves the chart's own Serve configuration, in a process of its own.

`python -m tests.support.cluster.served_chart FILE` deploys it by `serve run`, as docs/install.md does without
Helm: that hands the document to Serve's controller, as KubeRay does. One node has the logical resources of
every role, for two of each. Prints `ready HTTP_ADDRESS GRPC_ADDRESS`, serves until standard input ends.

Of the configuration only what pods have to themselves is changed: addresses and ports.
"""

import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.redis_server import RedisServer
from tests.support.cluster.ray_start import HOST, deploy, private_place, start_node


def main() -> None:
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    with private_place() as (directory, answer, started):
        redis = started.enter_context(RedisServer.start(directory / "redis"))
        # As in the chart, the password stands beside the URL.
        parts = urlsplit(redis.url)
        assert parts.password is not None
        os.environ["GAMMARAY_REDIS_PASSWORD"] = parts.password
        os.environ["GAMMARAY_REDIS_URL"] = redis.url.replace(f":{parts.password}@", "")
        http_port, grpc_port = free_ports(HOST, 2)
        start_node(directory, started, 2)
        deploy(on_one_machine(config, http_port, grpc_port), directory)
        answer(f"ready {HOST}:{http_port} {HOST}:{grpc_port}")
        sys.stdin.read()


def on_one_machine(config: dict[str, Any], http_port: int, grpc_port: int) -> dict[str, Any]:
    config["http_options"] = {"host": HOST, "port": http_port}
    config["grpc_options"]["port"] = grpc_port
    for application in config["applications"]:
        settings = application["args"]["settings"]
        settings["metrics_listen"] = ""
        if "listen" in settings:
            settings["listen"] = f"{HOST}:0"
    return config


if __name__ == "__main__":
    main()
