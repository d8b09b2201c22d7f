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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import redis

from tests.simulation.loop import Process, SimulatedLoop, current_process
from tests.simulation.network import Network, Wire
from tests.support.workers.redis_clock import redis_clock
from tests.support.workers.redis_helpers import PASSED, commands_of, configured_redis, reply_end

ADDRESS = "redis:6379"
URL = f"redis://{ADDRESS}/0"
SCRIPTS = {b"EVAL", b"EVALSHA"}
LOOK = b"*4\r\n$5\r\nHMGET\r\n$%d\r\n%b\r\n$4\r\nturn\r\n$4\r\nsize\r\n"
_NUMBER = re.compile(rb"\$\d+\r\n(\d+)\r\n")

START_US = 1_800_000_000_000_000


class RealRedis:
    """A redis-server whose clock is `set_clock`'s; looks by `admin` cost no simulated time."""

    def __init__(self, path: str, connected: socket.socket, clock: mmap.mmap) -> None:
        self._socket, self._clock = connected, clock
        self.admin = redis.Redis(unix_socket_path=path)

    def set_clock(self, time_us: int) -> None:
        struct.pack_into("q", self._clock, 0, time_us)

    def run(self, commands: bytes, count: int) -> list[bytes]:
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
    with TemporaryDirectory() as folder, redis_clock(Path(folder), START_US) as (clock, variables):
        path = f"{folder}/redis.sock"
        lines = (f"unixsocket {path}", 'save ""', "activerehashing no", "hz 1")
        with (
            patch.dict(os.environ, variables),
            configured_redis(*lines),
            socket.socket(socket.AF_UNIX) as connected,
        ):
            connected.connect(path)
            yield RealRedis(path, connected, clock)


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

    def __init__(self, loop: SimulatedLoop, real: RealRedis, sessions: bytes, network: Network) -> None:
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
        """Serve `SimulatedLoop.create_connection`; ConnectionRefusedError while the server is down."""
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
        return self.real.run(command, 1)[0] if name.upper() in PASSED else f"-{self.refusal}\r\n".encode()


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
