"""A Redis primary, its replica and a Sentinel behind links, with a clock and a small disk of their own.

Clients, replica and Sentinel have addresses of their own, so that a link tells them apart: 127.0.0.1 clients,
127.0.0.2 Sentinel, 127.0.0.3 servers that replicate.
"""

import contextlib
import mmap
import os
import secrets
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.launcher.preflight import free_ports
from tests.chaos.network.links import Link, Network
from tests.support.workers.redis_clock import redis_clock
from tests.support.workers.redis_helpers import configured_redis, wait_until

TOOL_S = 60.0
"""Until mount or umount must have ended."""

SENTINEL, REPLICAS = "127.0.0.2", "127.0.0.3"
SERVICE = "chaos"
DISK_MB = 384
DOWN_AFTER_MS = 1000
FAILOVER_TIMEOUT_S = 180.0
"""A Sentinel that finds its own timer late takes no decision for 30 s."""


@dataclass
class NetworkRedis:
    """Two servers of which Sentinel makes one the primary."""

    links: list[Link]  # to each of the two
    sentinel: Link
    password: str  # of the two
    disk: Path | None  # the disk of both servers; None: the machine does not let us mount one
    clock: mmap.mmap  # the numbers of both servers' clock (`redis_clock`)
    start: Callable[[Link], None]  # starts the server of a link, which has ended

    @property
    def url(self) -> str:
        return f"redis+sentinel://:{self.password}@127.0.0.1:{self.sentinel.port}/{SERVICE}/0"

    def primary(self) -> Link:
        """Return the link to the server that Sentinel calls the primary."""
        with redis.Redis(port=self.sentinel.target) as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(link for link in self.links if link.port == port)

    def client(self, link: Link) -> redis.Redis:
        """Return a client of a server, past its link."""
        retry = Retry(NoBackoff(), 0)
        return redis.Redis(port=link.target, password=self.password, socket_timeout=5, retry=retry)

    def wait_until_replicated(self) -> None:
        """Wait until the primary has its replica again, and Sentinel knows it: a failover is possible."""

        def is_whole() -> bool:
            (replica,) = set(self.links) - {self.primary()}
            with self.client(replica) as client, redis.Redis(port=self.sentinel.target) as sentinel:
                known = sentinel.sentinel_slaves(SERVICE)
                return client.info("replication").get("master_link_status") == "up" and any(
                    not (one["is_sdown"] or one["is_disconnected"]) for one in known
                )

        wait_until(is_whole, FAILOVER_TIMEOUT_S)

    def wait_for_failover(self, since: Link) -> None:
        wait_until(lambda: self.primary() is not since, FAILOVER_TIMEOUT_S)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the primary, whose replica Sentinel promotes; at the end it starts again, as the replica."""
        self.wait_until_replicated()
        primary = self.primary()
        with self.client(primary) as client:
            os.kill(client.info("server")["process_id"], signal.SIGKILL)
        try:
            yield
        finally:
            self.wait_for_failover(primary)
            self.start(primary)
            self.wait_until_replicated()

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Limit the memory to what is used: writes are refused, nothing is evicted."""
        with self.client(self.primary()) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"])
            try:
                yield
            finally:
                client.config_set("maxmemory", 0)

    @contextmanager
    def out_of_disk(self, disk: Path) -> Iterator[None]:
        """Fill the disk: the append-only file cannot grow."""
        with full(disk):
            yield
        for link in self.links:
            with self.client(link) as client:
                try:
                    client.info("server")
                except redis.ConnectionError:  # a replica that cannot store what the primary stored ends
                    self.start(link)
        self.wait_until_replicated()

    @contextmanager
    def other_clock(self, seconds: int) -> Iterator[None]:
        """Step both servers' clocks to so many seconds after the machine's, and back."""
        for offset in (seconds, 0):
            struct.pack_into("q", self.clock, 8, offset * 1_000_000)
            if offset:
                yield

    def set_min_replicas(self, count: int, max_lag_s: int) -> None:
        """Have the primary refuse writes while fewer replicas answered within the lag."""
        for link in self.links:
            with self.client(link) as client:
                client.config_set("min-replicas-max-lag", max_lag_s)
                client.config_set("min-replicas-to-write", count)


@contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill a file system to the last block, and free it at the end."""
    filler = disk / "filler"
    try:
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
        yield
    finally:
        filler.unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path | None]:
    """Mount a file system of this size at a folder; None if the machine does not let us."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False, timeout=TOOL_S).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=TOOL_S)


@contextmanager
def network_redis(network: Network) -> Iterator[NetworkRedis]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "disk").mkdir()
        disk = stack.enter_context(small_disk(folder / "disk", DISK_MB))
        clock, variables = stack.enter_context(redis_clock(folder))
        password = secrets.token_urlsafe(32)

        def start(link: Link, *lines: str) -> None:
            data = folder / "disk" / str(link.target)
            shutil.rmtree(data, ignore_errors=True)  # the new primary's data replace it, whole or not
            data.mkdir()
            lines = (
                f"dir {data}",
                "appendonly yes",
                "appendfsync no",
                'save ""',
                f"requirepass {password}",
                f"masterauth {password}",
                f"bind-source-addr {REPLICAS}",
                "replica-announce-ip 127.0.0.1",
                f"replica-announce-port {link.port}",
                "repl-timeout 15",
                # By the wall clock: after a step back the replica would wait as long.
                "repl-diskless-sync-delay 0",
                *lines,
            )
            with patch.dict(os.environ, variables):
                stack.enter_context(configured_redis(*lines, password=password, port=link.target))

        first, second = (network.link(port, announces=True) for port in free_ports("127.0.0.1", 2))
        start(first)
        start(second, f"replicaof 127.0.0.1 {first.port}")
        port = stack.enter_context(
            configured_redis(
                f"bind-source-addr {SENTINEL}",
                f"sentinel monitor {SERVICE} 127.0.0.1 {first.port} 1",
                f"sentinel auth-pass {SERVICE} {password}",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
                mode="--sentinel",
            )
        )
        found = NetworkRedis([first, second], network.link(port), password, disk, clock, start)
        found.wait_until_replicated()
        yield found
