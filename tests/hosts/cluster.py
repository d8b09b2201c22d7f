"""A cluster over hosts, as docs/hosts.md starts it: Redis, workers and orchestrators have their own hosts."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gammaray import Client, GammarayError
from orchestrator.launcher.redis_server import redis_binary
from tests.chaos.chaos_drafters import Way
from tests.hosts.link import enter
from tests.hosts.network import Host, Network
from tests.support.cluster.cluster_helpers import eventually
from tests.support.tls_helpers import Authority, role_certificates

GRPC_PORT, HTTP_PORT, WORKER_PORT, REDIS_PORT = 9000, 8000, 50051, 6379
PASSWORD = "of-many-hosts"
START_S = 300.0
CACHE_BUDGET_MB = "256"
_PROGRAM = (sys.executable, "-m", "gammaray")


@dataclass
class HostsCluster:
    network: Network  # all hosts
    folder: Path
    heads: tuple[str, ...] = ("head1", "head2")  # hosts of the orchestrators from which clients stream
    redis_url: str = ""  # registry and store of all
    http = ""
    ways = (Way("as the cluster drafts", (), {}),)

    def __post_init__(self) -> None:
        self._tls = role_certificates(Authority(self.folder, "hosts"))

    def host(self, name: str) -> Host:
        return self.network.hosts[name]

    def start_redis(self) -> None:
        host = self.network.add("redis")
        command = [redis_binary(), "--bind", host.address, "127.0.0.1", "--port", str(REDIS_PORT)]
        command += ["--requirepass", PASSWORD, "--appendonly", "yes", "--save", ""]
        host.start("redis", command, os.environ, cwd=host.folder)
        self.redis_url = f"redis://:{PASSWORD}@{host.address}:{REDIS_PORT}/0"

    def start_worker(self, role: str, name: str) -> None:
        """Start a worker on a host, which is new or has none."""
        host = self.network.hosts.get(name) or self.network.add(name)
        listen = f"--listen={host.address}:{WORKER_PORT}"
        environment = self._environment("worker") | {"GAMMARAY_CACHE_BUDGET_MB": CACHE_BUDGET_MB}
        host.start(f"{role}-worker", [*_PROGRAM, "worker", role, listen], environment)

    def start_orchestrator(self, name: str) -> None:
        """Start an orchestrator on a new host, with its own Ray."""
        command = [*_PROGRAM, "up", "--target-workers=0", "--host=0.0.0.0", "--api-keys-file=none"]
        self.network.add(name).start("orchestrator", command, self._environment("orchestrator"))

    @property
    def grpc(self) -> str:
        return ",".join(f"{self.host(name).address}:{GRPC_PORT}" for name in self.heads)

    def wait(self, **healthy: int) -> None:
        """Wait until each orchestrator reports so many healthy processes of a role, no more and no less."""

        def is_so(address: str) -> bool:
            with contextlib.suppress(GammarayError), Client(address) as client:
                roles = [process.role for process in client.status() if process.healthy]
                return all(roles.count(role) == count for role, count in healthy.items())
            return False

        for address in self.grpc.split(","):
            assert eventually(partial(is_so, address), START_S), self.logs()

    def logs(self) -> str:
        """Return the last lines of each process's log."""
        found = []
        for log in (log for host in self.network.hosts.values() for log in host.logs):
            with contextlib.suppress(FileNotFoundError):
                found.append(f"== {log}\n" + "\n".join(log.read_text().splitlines()[-30:]))
        return "\n".join(found)

    def _environment(self, role: str) -> dict[str, str]:
        tls_dir = str(self._tls[role].ca.parent)
        return {**os.environ, "GAMMARAY_REDIS_URL": self.redis_url, "GAMMARAY_TLS_DIR": tls_dir}


@contextmanager
def running(folder: Path) -> Iterator[HostsCluster]:
    """Start Redis, two orchestrators, a draft worker and two target workers, each on a host of its own.

    This process becomes one of the client's host, to which all of its sockets belong from now on.
    """
    with Network.made(folder) as network:
        cluster = HostsCluster(network, folder)
        enter(network.add("client").namespace)
        cluster.start_redis()
        for role, name in (("target", "target1"), ("target", "target2"), ("draft", "draft")):
            cluster.start_worker(role, name)
        for name in cluster.heads:
            cluster.start_orchestrator(name)
        cluster.wait(target=2, draft=1, orchestrator=2, redis=1)
        yield cluster
