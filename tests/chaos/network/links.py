"""TCP proxies in front of the servers of a cluster, which cut, stall, swallow, delay and throttle.

A proxy does to bytes what TCP lets a network do: a lost segment comes late, bytes never come twice or in
another order, and a connection that lost bytes for good is reset in the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gammaray.aio import end_tasks

CLIENTS = "127.0.0.1"
UP, DOWN = "up", "down"
"""Directions: to the server, and back."""

CHUNK_BYTES, SLOW_BYTES, MAX_HELD = 16_384, 256, 64
BUFFER_BYTES = 8192
"""Of each connection in the kernel and here, so that a server soon has to wait for a slow reader."""

RETRANSMIT_S = 0.2
"""Linux's least timeout after which TCP sends a lost segment again."""

FRESH_S = 3.0
"""A worker that has not announced itself for so long is gone."""

_ANNOUNCED = re.compile(rb':worker:(draft|target):\w+\r\n\$\d+\r\n\{"address": "127\.0\.0\.1:(\d{5})"')


@dataclass(frozen=True)
class Fault:
    """What happens to the bytes of a link."""

    name: str  # name in results
    ways: tuple[str, ...] = (UP, DOWN)  # directions that it concerns
    is_cut: bool = False  # connections are reset, and new ones too
    # Bytes are accepted and discarded; connections that lost some are reset at the end.
    swallows: bool = False
    stalls: bool = False  # bytes wait until the end
    delay_s: float = 0.0  # time that bytes wait, in seconds, and as much again at most by chance
    loss: float = 0.0  # share of the chunks that wait for a retransmission, and those behind them
    bytes_per_s: float | None = None  # bandwidth of each connection; None: not limited


NONE = Fault("none")
FAULTS = (
    Fault("cut", is_cut=True),
    Fault("half-open", swallows=True),
    Fault("half-open, requests lost", (UP,), swallows=True),
    Fault("half-open, answers lost", (DOWN,), swallows=True),
    Fault("stalled", stalls=True),
    Fault("stalled, answers only", (DOWN,), stalls=True),
    Fault("delayed by 0.1 to 0.2 s", delay_s=0.1),
    Fault("10 % lost", loss=0.1),
    Fault("4 kB/s", bytes_per_s=4096),
    Fault("slow reader, 0.5 kB/s", (DOWN,), bytes_per_s=512),
)


class Link:
    """A proxy in front of one server of this machine; made by `Network.link`.

    Connections from other addresses than `CLIENTS` have the system's buffers: a replica transfers much.

    Attributes:
        port: Where it listens.
        target: Port of the server.
        sources: Addresses of the clients that a fault concerns; empty: all.
        seen_at: When its server was announced last, on the monotonic clock.
    """

    def __init__(self, target: int, rewrite: Callable[[bytes], bytes] | None = None) -> None:
        self.target, self.sources, self.seen_at = target, frozenset[str](), time.monotonic()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self._rewrite, self._rng = rewrite, random.Random(target)
        self._fault, self._healed = NONE, asyncio.Event()
        self._connections: dict[
            asyncio.StreamWriter, tuple[str, asyncio.StreamWriter, list[asyncio.Task[None]]]
        ] = {}
        self._holed: set[asyncio.StreamWriter] = set()

    def set(self, fault: Fault, sources: frozenset[str]) -> None:
        """Begin a fault, or end it with `NONE`; called in the loop of the proxies."""
        self._healed.set()
        self._healed = asyncio.Event()
        for client in tuple(self._holed):
            self._reset(client)
        self._fault, self.sources = fault, sources
        if fault.is_cut:
            for client, (source, *_) in list(self._connections.items()):
                if self._concerns(source):
                    self._reset(client)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = writer.get_extra_info("peername")[0]
        try:
            answers, server = await asyncio.open_connection("127.0.0.1", self.target, limit=BUFFER_BYTES)
        except OSError:
            return _abort(writer)
        for end in (writer, server) if source == CLIENTS else ():
            end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        ways = ((reader, server, UP), (answers, writer, DOWN))
        tasks = [asyncio.create_task(self._carry(*way, writer, source)) for way in ways]
        self._connections[writer] = (source, server, tasks)
        if self._fault.is_cut and self._concerns(source):
            self._reset(writer)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*tasks)
            self._connections.pop(writer, None)
            self._holed.discard(writer)
            for end in (server, writer):
                end.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: str,
        client: asyncio.StreamWriter,
        source: str,
    ) -> None:
        """Carry one direction until its end, in order; reading pauses while much waits."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_HELD)
        sending = asyncio.create_task(self._send(held, writer, way, client, source))
        try:
            due = 0.0
            with contextlib.suppress(OSError):
                while data := await reader.read(self._chunk_bytes(way, source)):
                    fault = self._fault_of(way, source)
                    if fault.bytes_per_s is not None:
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(self._healed.wait(), len(data) / fault.bytes_per_s)
                    wait_s = fault.delay_s * (1 + self._rng.random())
                    wait_s += RETRANSMIT_S * (self._rng.random() < fault.loss)
                    due = max(due, time.monotonic() + wait_s)
                    await held.put((due, data))
            await held.put((due, b""))
            await sending
        finally:
            sending.cancel()

    async def _send(
        self,
        held: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        way: str,
        client: asyncio.StreamWriter,
        source: str,
    ) -> None:
        while True:
            due, data = await held.get()
            await asyncio.sleep(due - time.monotonic())
            while self._fault_of(way, source).stalls:
                await self._healed.wait()
            fault = self._fault_of(way, source)
            if fault.swallows or client in self._holed:  # bytes behind a hole are never delivered
                self._holed.add(client)
                continue
            if not data:
                return
            if way == UP and self._rewrite is not None:
                data = self._rewrite(data)
            with contextlib.suppress(OSError):
                writer.write(data)
                await writer.drain()

    def _chunk_bytes(self, way: str, source: str) -> int:
        return CHUNK_BYTES if self._fault_of(way, source).bytes_per_s is None else SLOW_BYTES

    def _fault_of(self, way: str, source: str) -> Fault:
        return self._fault if way in self._fault.ways and self._concerns(source) else NONE

    def _concerns(self, source: str) -> bool:
        return not self.sources or source in self.sources

    def _reset(self, client: asyncio.StreamWriter) -> None:
        _, server, tasks = self._connections[client]
        for end in (client, server):
            _abort(end)
        for task in tasks:
            task.cancel()


def _abort(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST."""
    end = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class Network:
    """The links of a cluster, in a thread of their own; `workers` has those to workers by role and port."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[int, Link]] = {"target": {}, "draft": {}}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Network:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    @staticmethod
    async def _close() -> None:
        await end_tasks(*asyncio.all_tasks() - {asyncio.current_task()})

    def link(self, target: int, *, announces: bool = False) -> Link:
        """Begin to lead to a port of this machine; `announces`: workers announce themselves there."""
        link = Link(target, self._lead_to_workers if announces else None)
        self._loop.call_soon_threadsafe(self._serve, link)
        return link

    @contextmanager
    def faulty(self, links: list[Link], fault: Fault, *sources: str) -> Iterator[None]:
        """Have links be faulty within the context, for clients of these addresses or all."""
        self._set(links, fault, frozenset(sources))
        try:
            yield
        finally:
            self._set(links, NONE, frozenset())

    def serving(self, role: str) -> list[Link]:
        """Return the links to the workers of a role that announce themselves."""
        since = time.monotonic() - FRESH_S
        return [link for link in list(self.workers[role].values()) if link.seen_at > since]

    def _set(self, links: list[Link], fault: Fault, sources: frozenset[str]) -> None:
        for link in links:
            self._loop.call_soon_threadsafe(link.set, fault, sources)

    def _serve(self, link: Link) -> None:
        def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._loop.create_task(link.serve(reader, writer))

        self._loop.create_task(asyncio.start_server(serve, sock=link.listener, limit=BUFFER_BYTES))

    def _lead_to_workers(self, data: bytes) -> bytes:
        """Replace the port by which a worker announces itself by that of a link."""
        if (found := _ANNOUNCED.search(data)) is None:
            return data
        links, port = self.workers[found[1].decode()], int(found[2])
        if port not in links:
            links[port] = self.link(port)
        links[port].seen_at = time.monotonic()
        return data[: found.start(2)] + str(links[port].port).encode() + data[found.end(2) :]
