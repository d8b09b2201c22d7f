"""A cluster over hosts, as docs/hosts.md starts it: Redis, workers and orchestrators have their own hosts."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.launcher.redis_server import redis_binary
from tests.hosts.network import Host, Network
from tests.support.tls_helpers import Authority, role_certificates

GRPC_PORT, HTTP_PORT, WORKER_PORT, REDIS_PORT = 9000, 8000, 50051, 6379
PASSWORD = "of-many-hosts"
START_S = 300.0
CACHE_BUDGET_MB = "256"
_LOAD_MARGIN_S = 230.0
_PERIOD_S = 1.0
_PROGRAM = (sys.executable, "-m", "gammaray")


@dataclass
class HostsCluster:
    """The hosts of one cluster.

    Attributes:
        network: All hosts.
        redis_url: Registry and store of all.
        expected: File with what plain decoding says, for `tests.hosts.load`.
    """

    network: Network
    folder: Path
    redis_url: str = ""
    expected: Path = field(init=False)

    def __post_init__(self) -> None:
        self.expected = self.folder / "expected.json"
        self._tls = role_certificates(Authority(self.folder, "hosts"))

    def host(self, name: str) -> Host:
        return self.network.hosts[name]

    def start_redis(self, name: str = "redis") -> None:
        """Start Redis on a host."""
        host = self.network.hosts.get(name) or self.network.add(name)
        (host.folder / "data").mkdir(exist_ok=True)
        command = [redis_binary(), "--bind", host.address, "127.0.0.1", "--port", str(REDIS_PORT)]
        command += ["--requirepass", PASSWORD, "--appendonly", "yes", "--save", ""]
        host.start("redis", command, os.environ, cwd=host.folder / "data")
        self.redis_url = f"redis://:{PASSWORD}@{host.address}:{REDIS_PORT}/0"

    def start_worker(self, role: str, name: str) -> Host:
        """Start a worker on a host, which is new or has none."""
        host = self.network.hosts.get(name) or self.network.add(name)
        listen = f"--listen={host.address}:{WORKER_PORT}"
        environment = self._environment("worker") | {"GAMMARAY_CACHE_BUDGET_MB": CACHE_BUDGET_MB}
        host.start(f"{role}-worker", [*_PROGRAM, "worker", role, listen], environment)
        return host

    def start_orchestrator(self, name: str) -> Host:
        """Start an orchestrator on a host, which is new or has none, with its own Ray."""
        host = self.network.hosts.get(name) or self.network.add(name)
        options = ["--target-workers=0", "--host=0.0.0.0", "--api-keys-file=none"]
        host.start("orchestrator", [*_PROGRAM, "up", *options], self._environment("orchestrator"))
        return host

    def address(self, name: str) -> str:
        """Return host:port of the gRPC API of an orchestrator's host."""
        return f"{self.host(name).address}:{GRPC_PORT}"

    def status(self, name: str) -> list[dict[str, Any]]:
        """Return what `gammaray status` on the client's host prints of an orchestrator; none: no answer."""
        command = [*_PROGRAM, "status", "--json", f"--address={self.address(name)}"]
        client = self.host("client")
        process = client.start("status", command, os.environ, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=START_S)
        found: list[dict[str, Any]] = json.loads(output)["processes"] if process.returncode == 0 else []
        return found

    def wait(self, name: str, **healthy: int) -> None:
        """Wait until an orchestrator reports so many healthy processes of each role, no more and no less."""
        ends = time.monotonic() + START_S
        while True:
            processes = self.status(name)
            roles = [process["role"] for process in processes if process["healthy"]]
            if processes and all(roles.count(role) == count for role, count in healthy.items()):
                return
            assert time.monotonic() < ends, (processes, self.logs())
            time.sleep(_PERIOD_S)

    def expect(self, name: str) -> None:
        """Ask an orchestrator for what plain decoding says."""
        self._load([self.address(name)]).communicate(timeout=START_S)
        assert self.expected.exists(), self.logs()

    @contextmanager
    def loaded(self, seconds: float, *names: str) -> Iterator[list[dict[str, Any]]]:
        """Stream from these orchestrators; after the block there are the reports of `tests.hosts.load`."""
        process = self._load([f"--seconds={seconds}", *map(self.address, names)])
        reports = list[dict[str, Any]]()
        yield reports
        output, _ = process.communicate(timeout=seconds + _LOAD_MARGIN_S)
        assert process.returncode == 0, self.logs()
        reports += json.loads(output)

    def logs(self, num_lines: int = 30) -> str:
        """Return the last lines of each process's log."""
        found = []
        for log in (log for host in self.network.hosts.values() for log in host.logs):
            with contextlib.suppress(FileNotFoundError):
                found.append(f"== {log}\n" + "\n".join(log.read_text().splitlines()[-num_lines:]))
        return "\n".join(found)

    def _load(self, options: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.hosts.load", f"--expect={self.expected}", *options]
        return self.host("client").start("load", command, os.environ, stdout=subprocess.PIPE)

    def _environment(self, role: str) -> dict[str, str]:
        tls_dir = str(self._tls[role].ca.parent)
        return {**os.environ, "GAMMARAY_REDIS_URL": self.redis_url, "GAMMARAY_TLS_DIR": tls_dir}


@contextmanager
def running(folder: Path, targets: int = 2) -> Iterator[HostsCluster]:
    """Start Redis, two orchestrators, a draft worker and target workers, each on a host of its own."""
    with Network.made(folder) as network:
        cluster = HostsCluster(network, folder)
        network.add("client")
        cluster.start_redis()
        for number in range(1, targets + 1):
            cluster.start_worker("target", f"target{number}")
        cluster.start_worker("draft", "draft")
        for name in ("head1", "head2"):
            cluster.start_orchestrator(name)
        for name in ("head1", "head2"):
            cluster.wait(name, target=targets, draft=1, orchestrator=2, redis=1)
        cluster.expect("head1")
        yield cluster
