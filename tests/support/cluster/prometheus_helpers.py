"""A real Prometheus, configured as documented."""

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.launcher.preflight import free_ports
from tests.programs import PROGRAMS

ROOT = Path(__file__).parents[3]
START_TIMEOUT_S, SCRAPE_S = 60.0, 1.0


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


@dataclass
class Prometheus:
    """A running server."""

    url: str

    def query(self, query: str) -> list[dict[str, Any]]:
        answer = get_json(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}")
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def number(self, query: str) -> float:
        """Return the one number that a query results in; NaN when there is none."""
        result = self.query(query)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else math.nan

    def wait_for(self, query: str, value: float) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.number(query) != value:
            assert time.monotonic() < deadline, f"{query}: {self.query(query)}, not {value}"
            time.sleep(0.2)


@contextmanager
def running_prometheus(http: str, directory: Path) -> Iterator[Prometheus]:
    binary = PROGRAMS["prometheus"].path
    assert binary is not None
    text = (ROOT / "docs" / "prometheus.yml").read_text().replace("http://127.0.0.1:8000", http)
    config = directory / "prometheus.yml"
    config.write_text(text.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S:g}s"))
    shutil.copy(ROOT / "docs" / "prometheus-rules.yml", directory)
    (port,) = free_ports("127.0.0.1", 1)
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        _wait_ready(prometheus, server)
        yield prometheus
    finally:
        server.terminate()
        try:
            server.wait(10)
        finally:
            server.kill()


def _wait_ready(prometheus: Prometheus, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"Prometheus is not ready; exit status {server.poll()}")
