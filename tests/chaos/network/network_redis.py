"""A Redis primary, its replica and a Sentinel behind links, with a clock and a small disk of their own.

Clients, replica and Sentinel have addresses of their own, so that a link tells them apart: 127.0.0.1 clients,
127.0.0.2 Sentinel, 127.0.0.3 servers that replicate.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.launcher.redis_server import RedisServer
from tests.chaos.network.links import Link, Network
from tests.support.workers.redis_helpers import configured_redis, port_of, wait_until

_TOOL_S = 60.0
"""Until mount, umount or the compiler must have ended."""

CLIENTS, SENTINEL, REPLICAS = "127.0.0.1", "127.0.0.2", "127.0.0.3"
SERVICE = "chaos"
DISK_MB = 384
DOWN_AFTER_MS = 1000
FAILOVER_TIMEOUT_S = 180.0
"""A Sentinel that finds its own timer late takes no decision for 30 s."""


@dataclass
class NetworkRedis:
    """Two servers of which Sentinel makes one the primary.

    Attributes:
        url: For clients: of Sentinel.
        servers: The two.
        links: To each of the two, by port of the server.
        own_urls: With the password that each server has when it starts, by its port.
        sentinel_link: To Sentinel.
        sentinel_port: Of Sentinel itself.
        disk: The disk of both servers; None: the machine does not let us mount one.
        clock: File with the offset of both servers' clocks, a C long of seconds.
        clock_variables: Environment variables of servers that follow it.
    """

    url: str
    servers: tuple[RedisServer, RedisServer]
    links: dict[int, Link]
    own_urls: dict[int, str]
    sentinel_link: Link
    sentinel_port: int
    disk: Path | None
    clock: Path
    clock_variables: dict[str, str]

    @property
    def all_links(self) -> list[Link]:
        return [*self.links.values()]

    def primary(self) -> RedisServer:
        """Return the server that Sentinel calls the primary."""
        with redis.Redis(port=self.sentinel_port) as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        return next(server for server in self.servers if self.links[port_of(server.url)].port == port)

    def primary_link(self) -> Link:
        return self.links[port_of(self.primary().url)]

    def wait_until_replicated(self) -> None:
        """Wait until the primary has its replica again, and Sentinel knows it: a failover is possible."""
        primary = self.primary()
        (replica,) = (server for server in self.servers if server is not primary)

        def is_whole() -> bool:
            with _client(replica) as client, redis.Redis(port=self.sentinel_port) as sentinel:
                known = sentinel.sentinel_slaves(SERVICE)
                info = client.info("replication")
                found[:] = [info, known]
                return info.get("master_link_status") == "up" and any(
                    not (one["is_sdown"] or one["is_disconnected"]) for one in known
                )

        found: list[object] = []
        try:
            wait_until(is_whole, FAILOVER_TIMEOUT_S)
        except AssertionError:
            raise AssertionError(f"the replica and what Sentinel knows of replicas: {found}") from None

    def wait_for_failover(self, since: RedisServer) -> None:
        wait_until(lambda: self.primary() is not since, FAILOVER_TIMEOUT_S)

    @contextmanager
    def killed(self) -> Iterator[None]:
        """Kill the primary, whose replica Sentinel promotes; at the end it starts again, as the replica."""
        self.wait_until_replicated()
        primary = self.primary()
        os.kill(primary.pid, signal.SIGKILL)
        try:
            yield
        finally:
            self.wait_for_failover(primary)
            self._restart(primary)

    def _restart(self, server: RedisServer) -> None:
        """Start an ended server again, and wait until it is the replica."""
        port, password = port_of(server.url), str(urlsplit(server.url).password)
        server.url = self.own_urls[port]
        with patch.dict(os.environ, self.clock_variables):
            server.revive()
        _configure(server, password, self.links[port])
        self.wait_until_replicated()

    @contextmanager
    def out_of_memory(self) -> Iterator[None]:
        """Limit the memory to what is used: writes are refused, nothing is evicted."""
        with _client(self.primary()) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"])
            try:
                yield
            finally:
                client.config_set("maxmemory", 0)

    @contextmanager
    def out_of_disk(self) -> Iterator[None]:
        """Fill the disk: the append-only file cannot grow."""
        assert self.disk is not None
        with full(self.disk):
            yield
        for server in self.servers:
            if not server.is_running:  # a replica that cannot store what the primary stored ends
                self._restart(server)

    @contextmanager
    def other_clock(self, seconds: int) -> Iterator[None]:
        """Step both servers' clocks to so many seconds after the machine's, and back."""
        for offset in (seconds, 0):
            with open(self.clock, "r+b") as file:  # in place, as it is mapped
                file.write(struct.pack("l", offset))
            if offset:
                yield

    def set_min_replicas(self, count: int, max_lag_s: int) -> None:
        """Have the primary refuse writes while fewer replicas answered within the lag."""
        for server in self.servers:
            with _client(server) as client:
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
    if subprocess.run(mount, capture_output=True, check=False, timeout=_TOOL_S).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=_TOOL_S)


@contextmanager
def network_redis(network: Network) -> Iterator[NetworkRedis]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        (folder / "disk").mkdir()
        disk = stack.enter_context(small_disk(folder / "disk", DISK_MB))
        clock = folder / "clock"
        clock_variables = _own_clock(clock)
        with patch.dict(os.environ, clock_variables):
            servers = tuple(
                stack.enter_context(RedisServer.start(folder / "disk" / name)) for name in ("one", "two")
            )
        # In the small buffers of other connections a copy of all data takes longer than `repl-timeout`.
        links = {
            (own := port_of(server.url)): network.link(own, announces=True, bulk=REPLICAS)
            for server in servers
        }
        password = str(urlsplit(servers[0].url).password)
        own_urls = {port_of(server.url): server.url for server in servers}
        for server in servers:
            _configure(server, password, links[port_of(server.url)])
        first, second = servers
        with _client(second) as client:
            client.replicaof("127.0.0.1", str(links[port_of(first.url)].port))
        port = stack.enter_context(
            configured_redis(
                f"bind-source-addr {SENTINEL}",
                f"sentinel monitor {SERVICE} 127.0.0.1 {links[port_of(first.url)].port} 1",
                f"sentinel auth-pass {SERVICE} {password}",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}",
                f"sentinel failover-timeout {SERVICE} 3000",
                mode="--sentinel",
            )
        )
        sentinel_link = network.link(port)
        url = f"redis+sentinel://:{password}@127.0.0.1:{sentinel_link.port}/{SERVICE}/0"
        found = NetworkRedis(
            url, (first, second), links, own_urls, sentinel_link, port, disk, clock, clock_variables
        )
        found.wait_until_replicated()
        yield found


def _configure(server: RedisServer, password: str, link: Link) -> None:
    """Give a server the common password, and the address of its link; sets its `url`."""
    with _client(server) as client:
        client.config_set("requirepass", password)
        client.execute_command("AUTH", password)
        client.config_set("masterauth", password)
        client.config_set("bind-source-addr", REPLICAS)
        client.config_set("replica-announce-ip", "127.0.0.1")
        client.config_set("replica-announce-port", link.port)
        client.config_set("repl-timeout", 15)
        # Redis measures the delay by the wall clock: after a step back the replica would wait as long.
        client.config_set("repl-diskless-sync-delay", 0)
    server.url = f"redis://:{password}@127.0.0.1:{port_of(server.url)}/0"


def _own_clock(clock: Path) -> dict[str, str]:
    """Return environment variables by which processes add the seconds in a file to the machine's clock."""
    clock.write_bytes(struct.pack("l", 0))
    library = clock.with_suffix(".so")
    command = [sysconfig.get_config_var("CC").split()[0], "-O2", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([*command, str(Path(__file__).with_name("clock.c"))], check=True, timeout=_TOOL_S)
    return {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}


def _client(server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(
        server.url, socket_timeout=5, decode_responses=True, retry=Retry(NoBackoff(), 0)
    )
