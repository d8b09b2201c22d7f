"""A real Redis on the virtual clock, and the simulated TCP connections to it.

The server runs commands one at a time, each when its bytes arrive in simulated time: the simulation waits for
the reply on a blocking socket. Its clock is a file that the simulation writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import redis

from orchestrator.launcher.redis_server import redis_binary
from tests.simulation.loop import Process, SimulatedLoop, current_process
from tests.simulation.network import Network, Wire
from tests.support.workers.redis_clock import redis_clock

ADDRESS = "redis:6379"
URL = f"redis://{ADDRESS}/0"
OPENING = {b"HELLO", b"CLIENT", b"AUTH", b"SELECT"}
"""Commands that open a connection; a server that refuses others takes them."""

SCRIPTS = {b"EVAL", b"EVALSHA"}
LOOK = b"*4\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n$4\r\nturn\r\n$4\r\nsize\r\n"
_NUMBER = re.compile(rb"\$\d+\r\n(\d+)\r\n")

START_US = 1_800_000_000_000_000


class RealRedis:
    """A redis-server whose clock is `set_clock`'s.

    Attributes:
        admin: Client for the simulation's own looks, which cost no simulated time.
    """

    def __init__(self, path: str, connected: socket.socket, clock: mmap.mmap) -> None:
        self._socket, self._clock = connected, clock
        self.admin = redis.Redis(unix_socket_path=path)

    def set_clock(self, time_us: int) -> None:
        struct.pack_into("q", self._clock, 0, time_us)

    def run(self, commands: bytes, count: int) -> list[bytes]:
        """Run `count` commands and return their replies."""
        self._socket.sendall(commands)
        replies: list[bytes] = []
        data, start = b"", 0
        while len(replies) < count:
            if end := reply_end(data, start):
                replies.append(data[start:end])
                start = end
            elif received := self._socket.recv(65536):
                data += received
            else:
                raise ConnectionError("redis-server has ended")
        return replies

    def dump(self) -> dict[bytes, tuple[bytes, int]]:
        """Return all keys with their serialised values and the time at which they expire (ms; 0: never)."""
        (now_us,) = struct.unpack_from("q", self._clock, 0)
        found = {}
        for key in self.admin.keys("*"):
            left_ms = self.admin.pttl(key)  # PEXPIRETIME is in Redis since 7.0
            found[key] = (self.admin.dump(key), now_us // 1000 + left_ms if left_ms >= 0 else 0)
        return found

    def restore(self, state: dict[bytes, tuple[bytes, int]]) -> None:
        """Put back what `dump` returned, and nothing else."""
        self.admin.flushall()
        for key, (value, expires) in state.items():
            self.admin.restore(key, expires, value, absttl=True)


@contextlib.contextmanager
def real_redis() -> Iterator[RealRedis]:
    """Run a server of this process alone."""
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = f"{folder}/redis.sock"
        clock, variables = stack.enter_context(redis_clock(Path(folder), START_US))
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--activerehashing", "no", "--hz", "1"]
        command = [redis_binary(), *options, "--dir", folder]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **variables})
        try:
            deadline = time.monotonic() + 10.0
            while (connected := _connected(path)) is None:
                assert time.monotonic() < deadline, "redis-server does not start"
                time.sleep(0.01)
            yield RealRedis(path, connected, clock)
        finally:
            server.kill()
            server.wait(10)


def _connected(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:  # it does not listen yet
        connection.close()
        return None
    return connection


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


def commit_of(words: list[bytes]) -> tuple[bytes, int] | None:
    """Return the key and the epoch if the session store's `COMMIT` or `END` is called; None for others."""
    num_keys = int(words[2])
    arguments = words[3 + num_keys :]
    if (num_keys, len(arguments)) == (2, 6):
        return words[3], int(arguments[0])
    return (words[3], int(arguments[4])) if (num_keys, len(arguments)) == (12, 10) else None


class RedisServer:
    """The simulated server: reachable or not, fast or slow, with a clock that may be set.

    Args:
        loop: The simulation's.
        real: What runs the commands.
        sessions: Beginning of the keys of sessions.
        network: Between the server and its clients.

    Attributes:
        is_up: Whether it accepts connections.
        busy_until: Virtual time until which it answers nothing.
        refusal: Error reply to all commands; empty: it runs them.
        clock_offset_s: How far its clock is ahead of the simulation's.
        stored: The turn and the number of bytes of each session, read after each script that may change them.
        on_commit: Called with the process, the session's key and the epoch of each commit that was accepted.
    """

    def __init__(
        self,
        loop: SimulatedLoop,
        real: RealRedis,
        sessions: bytes,
        network: Network,
    ) -> None:
        self._loop, self.real, self.network = loop, real, network
        self._sessions = sessions
        self.stored: dict[bytes, tuple[int, int]] = {}
        self.process = loop.process("redis")
        self.is_up, self.busy_until, self.refusal, self.clock_offset_s = True, 0.0, "", 0.0
        self.on_commit: Callable[[Process, bytes, int], None] = lambda *_: None
        self._connections: list[Connection] = []
        self.set_clock()
        real.admin.flushall()
        real.admin.script_flush()  # else the scripts of other schedules would be known

    def set_clock(self) -> None:
        """Set the server's clock to the simulation's, plus the offset."""
        self.real.set_clock(START_US + round((self._loop.now + self.clock_offset_s) * 1e6))

    async def connect(self, factory: Callable[[], Any], _: str) -> Any:
        """Serve `SimulatedLoop.create_connection`.

        Raises:
            ConnectionRefusedError: The server is down.
        """
        client = current_process()
        while True:
            await asyncio.sleep(self.network.delay_s())
            if not {(client.name, "redis"), ("redis", client.name)} & self.network.blocked:
                break
            await asyncio.sleep(0.2)  # the handshake is sent again
        if not self.is_up:
            raise ConnectionRefusedError(f"{ADDRESS} refuses the connection")
        protocol = factory()
        connection = Connection(self._loop, self, client, protocol)
        self._connections.append(connection)
        protocol.connection_made(connection)
        return connection, protocol

    def cut(self) -> None:
        """Break all connections."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.reset()

    def flush(self) -> None:
        """Go on with what was held while the network was blocked."""
        for connection in self._connections:
            connection.wire.flush()

    def receive(self, connection: Connection, data: bytes) -> None:
        """Run the commands that a connection has brought; called in the server's process."""
        commands, connection.unread = commands_of(connection.unread + data)
        if not commands:
            return
        self.set_clock()
        if self.refusal:
            connection.answer(b"".join(self._refused(command, words[0]) for command, words in commands))
            return
        scripts = [words for _, words in commands if words[0] in SCRIPTS]
        heads = sorted({words[3] for words in scripts if words[3].startswith(self._sessions)})
        sent = b"".join([command for command, _ in commands] + [LOOK % (len(head), head) for head in heads])
        replies = self.real.run(sent, len(commands) + len(heads))
        for head, reply in zip(heads, replies[len(commands) :], strict=True):
            found = [int(number) for number in _NUMBER.findall(reply)]
            self.stored[head] = (found[0], found[1]) if len(found) == 2 else (0, 0)
        for (_, words), reply in zip(commands, replies, strict=False):
            if words[0] in SCRIPTS and not reply.startswith((b":-", b"-")) and (found := commit_of(words)):
                self.on_commit(connection.client, *found)
        connection.answer(b"".join(replies[: len(commands)]))

    def _refused(self, command: bytes, name: bytes) -> bytes:
        return self.real.run(command, 1)[0] if name.upper() in OPENING else f"-{self.refusal}\r\n".encode()


class Connection(asyncio.Transport):
    """One TCP connection, as its client's uvloop transport; bytes arrive in order, none after a break."""

    def __init__(self, loop: SimulatedLoop, server: RedisServer, client: Process, protocol: Any) -> None:
        super().__init__()
        self._loop, self._server, self.client, self._protocol = loop, server, client, protocol
        self._is_closing = self._is_reset = self._is_lost = False
        self.wire = Wire(server.network, client, server.process)
        self.unread = b""

    def write(self, data: Any) -> None:
        if self._is_lost:
            raise RuntimeError("unable to perform operation on <TCPTransport>; the handler is closed")
        if not self._is_closing:
            self.wire.send(0, partial(self._arrive, 0, bytes(data)))

    def answer(self, data: bytes) -> None:
        """Send replies; called by the server."""
        self.wire.send(1, partial(self._arrive, 1, data), self._server.busy_until)

    def _arrive(self, way: int, data: bytes) -> None:
        if self._is_reset:
            return
        if way == 0:
            self._server.receive(self, data)
        elif not self._is_closing:
            self._protocol.data_received(data)

    def reset(self) -> None:
        """Break the connection; what is on its way is lost."""
        self._is_reset = True
        if not self._is_closing:
            self._is_closing = True
            delay_s = self._server.network.delay_s()
            error = ConnectionResetError("the connection was reset")
            self._loop.call_later(delay_s, self._lose, error, context=self.client.context)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def _lose(self, error: Exception | None) -> None:
        self._is_lost = True
        self._protocol.connection_lost(error)
