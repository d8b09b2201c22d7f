"""A real Redis for a test module, and a way to it that fails as tests need it."""

import asyncio
import contextlib
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pytest
import redis

from orchestrator.launcher import redis_server
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.redis_server import RedisServer, redis_binary

PASSED = {b"AUTH", b"HELLO", b"CLIENT", b"SELECT"}
"""Commands that open a connection; a server that refuses others takes them."""


EACH_SERVER = ["embedded", pytest.param("redis-server", marks=pytest.mark.needs("redis-server"))]
"""The server of the extra `embedded`, and Debian's."""


@contextmanager
def running_redis(name: str = "embedded") -> Iterator[RedisServer]:
    """Run a private server of `EACH_SERVER`; it holds nothing at first."""
    with TemporaryDirectory() as folder:
        with pytest.MonkeyPatch.context() as patch:
            if name != "embedded":
                binary = shutil.which(name)
                patch.setattr(redis_server, "redis_binary", lambda: binary)
            server = RedisServer.start(Path(folder))
        with server:
            yield server


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


class RedisName:
    """A host name that leads to one server or another, and stays while servers come and go.

    Attributes:
        target: Port of the server that new connections are led to.
        reply: Error reply to all commands, such as "BUSY Redis is busy"; empty: the server answers.
        refused: Commands that got it, with their first argument.
        version: Of Redis that INFO reports; empty: the server's own.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.reply = ""
        self.refused: list[str] = []
        self.version = ""
        self.port = 0
        self._open: set[asyncio.StreamWriter] = set()

    def reset(self) -> int:
        """End all connections by RST, as load balancers and NAT end idle ones; return their number."""
        number = len(self._open)
        for writer in self._open:
            end = writer.get_extra_info("socket")
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._open.clear()
        return number

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection: command by command, so that any of them can be refused."""
        try:
            upstream, downstream = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self._open.add(writer)
        try:
            unread = b""
            while data := await reader.read(65536):
                commands, unread = commands_of(unread + data)
                for command, words in commands:
                    if self.reply and words[0].upper() not in PASSED:
                        self.refused.append(b" ".join(words[:2]).decode(errors="replace"))
                        writer.write(f"-{self.reply}\r\n".encode())
                        continue
                    downstream.write(command)
                    reply = await _read_reply(upstream)
                    writer.write(_with_version(reply, self.version) if self.version else reply)
        except OSError:
            pass
        finally:
            self._open.discard(writer)
            downstream.close()
            writer.close()


@asynccontextmanager
async def redis_name(server: RedisServer) -> AsyncIterator[tuple[RedisName, str]]:
    name = RedisName(port_of(server.url))
    listener = await asyncio.start_server(name.serve, "127.0.0.1", 0)
    name.port = listener.sockets[0].getsockname()[1]
    try:
        yield name, server.url.replace(f":{name.target}/", f":{name.port}/")
    finally:
        listener.close()


def _with_version(reply: bytes, version: str) -> bytes:
    if not (found := re.search(rb"redis_version:[^\r]*", reply)):
        return reply
    told = reply.replace(found[0], f"redis_version:{version}".encode()).partition(b"\r\n")[2]
    return b"$%d\r\n%b" % (len(told) - 2, told)


def reply_end(data: bytes, start: int) -> int:
    """Return where the reply ends that starts at `start`; 0 if the rest is not there yet."""
    line = data.find(b"\r\n", start)
    if line < 0:
        return 0
    kind, end = data[start : start + 1], line + 2
    if kind in b"$=!":
        length = int(data[start + 1 : line])
        end += length + 2 if length >= 0 else 0
        return end if end <= len(data) else 0
    if kind in b"*~>%":
        count = int(data[start + 1 : line])
        for _ in range(2 * count if kind == b"%" else count):
            end = reply_end(data, end)
            if not end:
                return 0
    return end


def commands_of(data: bytes) -> tuple[list[tuple[bytes, list[bytes]]], bytes]:
    """Return the complete commands of a stream, each with its words, and the bytes after them."""
    commands, start = [], 0
    while (line := data.find(b"\r\n", start)) >= 0:
        words, at = [], line + 2
        for _ in range(int(data[start + 1 : line])):
            if (line := data.find(b"\r\n", at)) < 0:
                return commands, data[start:]
            end = line + 2 + int(data[at + 1 : line])
            words.append(data[line + 2 : end])
            at = end + 2
        if at > len(data):
            break
        commands.append((data[start:at], words))
        start = at
    return commands, data[start:]


async def _read_reply(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while not reply_end(data, 0):
        received = await reader.read(65536)
        if not received:
            raise ConnectionError("the server has ended")
        data += received
    return data


@contextmanager
def replicated() -> Iterator[tuple[RedisServer, RedisServer]]:
    with running_redis() as primary, running_redis() as replica:
        password = urlsplit(primary.url).password
        assert password
        with redis.Redis.from_url(replica.url) as client:
            client.config_set("masterauth", password)
            client.config_set("requirepass", password)
        replica.url = primary.url.replace(str(port_of(primary.url)), str(port_of(replica.url)))
        with redis.Redis.from_url(primary.url) as client:
            client.config_set("masterauth", password)
        follow(replica, primary)
        yield primary, replica


def follow(replica: RedisServer, primary: RedisServer) -> None:
    """Make one server the replica of another and wait until it has the other's data."""
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("127.0.0.1", str(port_of(primary.url)))
        wait_until(lambda: client.info("replication")["master_link_status"] == "up")


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait until a condition holds; a server that does not answer does not fulfil it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(redis.RedisError):
            if condition():
                return
        time.sleep(0.02)
    raise AssertionError("it never came true")


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


@contextmanager
def configured_redis(*lines: str, mode: str = "", password: str = "", port: int = 0) -> Iterator[int]:
    """Run a server with these lines of configuration, which set the password; yields its port."""
    with TemporaryDirectory() as folder:
        # A node of a Redis Cluster listens on the port 10,000 above its own, too.
        port = port or next(port for port in free_ports("127.0.0.1", 64) if _is_free(port + 10_000))
        config = Path(folder) / "redis.conf"
        own = [f"port {port}", "bind 127.0.0.1", f"dir {folder}"]
        config.write_text("\n".join([*own, *lines]) + "\n")
        command = [redis_binary(), str(config), *([mode] if mode else [])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with redis.Redis(port=port, password=password or None) as client:
                wait_until(lambda: bool(client.ping()))
            yield port
        finally:
            process.kill()
            process.wait(30)
