"""Simulated gRPC: channels, calls and servers with the interface of `grpc.aio` that the product uses.

Messages are serialised, and those of one connection arrive in order: HTTP/2 over TCP neither loses, repeats
nor reorders them. A network can delay them, hold one direction, and break the connection, when what is on its
way is lost or still arrives. An orchestrator notices a peer that does not answer pings within 2.5 s, as its
`CHANNEL_OPTIONS` say, a worker within 25 s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import grpc

from tests.simulation.loop import Process, SimulatedLoop, current_process

CLIENT_KEEPALIVE_S, SERVER_KEEPALIVE_S = (1.0, 2.5), 25.0
RECONNECT_S = 0.1
CONNECT_TIMEOUT_S = 5.0
EOF: Any = vars(grpc.aio)["EOF"]

Status = tuple[grpc.StatusCode, str, tuple[Any, ...]]


class Server:
    """The methods that a process serves at an address; takes the registrations of generated code."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.methods: dict[str, Any] = {}
        self.connections: list[Connection] = []
        self.is_serving = True

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.methods |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def add_generic_rpc_handlers(self, _: Any) -> None:
        """Take no notice: the registered methods are the same."""

    @property
    def is_up(self) -> bool:
        return self.process.is_alive and self.is_serving


class Network:
    """The servers, and the state of the network between the processes.

    Args:
        loop: The simulation's.

    Attributes:
        servers: By address.
        blocked: Pairs of names: messages from the first process to the second are held.
        latency_s: Least and most seconds that a message travels.
        on_answer: Called with the process, the method and each message that it sends as an answer.
    """

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.rng = loop, loop.rng
        self.servers: dict[str, Server] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.latency_s = (1e-4, 2e-3)
        self.on_answer: Callable[[Process, str, Any], None] = lambda *_: None
        self._balanced: dict[str, list[Server]] = {}

    def delay_s(self) -> float:
        least, most = self.latency_s
        return least + (most - least) * self.rng.random()

    def balance(self, name: str, server: Server) -> None:
        """Serve an address with several servers: each call goes to one, as through Serve's proxy."""
        self._balanced.setdefault(name, []).append(server)

    def find(self, address: str) -> Server | None:
        """Return the server that takes a connection now."""
        if address in self._balanced:
            up = [server for server in self._balanced[address] if server.is_up]
            return self.rng.choice(up) if up else None
        server = self.servers.get(address)
        return server if server is not None and server.is_up else None

    @property
    def connections(self) -> list[Connection]:
        servers = [*self.servers.values(), *(one for many in self._balanced.values() for one in many)]
        return [connection for server in servers for connection in server.connections]

    def changed(self) -> None:
        """Let connections notice that the network, or a process, stopped answering or answers again."""
        for connection in self.connections:
            connection.wire.flush()
            if connection.is_mute:
                connection.watch()

    def end(self, process: Process) -> None:
        """Break the connections of a process that was killed; sometimes its peers are not told."""
        is_told = self.rng.random() < 0.7
        for connection in self.connections:
            if process in (connection.client, connection.server.process):
                if is_told:
                    connection.reset("Socket closed")
                else:
                    connection.watch()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make `grpc.aio.insecure_channel` return simulated channels."""
        with patch.object(grpc.aio, "insecure_channel", lambda address, *_, **__: Channel(self, address)):
            yield


class Wire:
    """Two ways between processes: what is sent arrives later, in order, and not while its way is blocked."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self.network, self.sides = network, (client, server)
        self._arrivals = [0.0, 0.0]
        self._held: tuple[list[Callable[[], None]], list[Callable[[], None]]] = ([], [])

    def send(self, way: int, action: Callable[[], None], not_before: float = 0.0) -> None:
        """Run `action` in the server (way 0) or the client (way 1) when it has travelled there."""
        source, target = self.sides[way], self.sides[1 - way]
        if self._held[way] or (source.name, target.name) in self.network.blocked:
            self._held[way].append(action)
            return
        loop = self.network.loop
        arrival = max(loop.now, not_before) + self.network.delay_s()
        self._arrivals[way] = max(self._arrivals[way], arrival)
        loop.call_at(self._arrivals[way], action, context=target.context)

    def flush(self) -> None:
        """Send what was held, if it can be sent now."""
        for way in (0, 1):
            held = self._held[way][:]
            self._held[way].clear()
            for action in held:
                self.send(way, action)

    def drop(self, way: int) -> None:
        """Lose what is held on a way."""
        self._held[way].clear()


class Connection:
    """A connection; `is_open` says whether the client (0) and the server (1) use it."""

    def __init__(self, network: Network, client: Process, server: Server) -> None:
        self._network, self.client, self.server = network, client, server
        self.client_calls: list[ClientCall] = []
        self.server_calls: list[ServerCall] = []
        self.is_open = [True, True]
        self.wire = Wire(network, client, server.process)
        server.connections.append(self)

    @property
    def is_mute(self) -> bool:
        """Whether pings are not answered."""
        names = self.client.name, self.server.process.name
        blocked = self._network.blocked
        if names in blocked or names[::-1] in blocked or self.server.process.is_paused:
            return True
        return not (self.client.is_alive and self.server.process.is_alive)

    def send(self, way: int, action: Callable[[], None]) -> None:
        """Run `action` in the server (way 0) or the client (way 1) when it has travelled there."""
        self.wire.send(way, partial(self._arrive, 1 - way, action))

    def _arrive(self, side: int, action: Callable[[], None]) -> None:
        if self.is_open[side]:
            action()

    def watch(self) -> None:
        """Break the connection at the sides that get no answer to their pings for long enough."""
        loop, sides = self._network.loop, (self.client, self.server.process)
        waits = self._network.rng.uniform(*CLIENT_KEEPALIVE_S), SERVER_KEEPALIVE_S
        for side in (0, 1):
            loop.call_later(waits[side], self._ping, side, context=sides[side].context)

    def _ping(self, side: int) -> None:
        if self.is_mute and self.is_open[side]:
            self.close(side, "keepalive watchdog timeout")

    def reset(self, reason: str, server_after_s: float = 0.0) -> None:
        """Break the connection; each side learns of it some time later, the server `server_after_s` more."""
        for side, process in enumerate((self.client, self.server.process)):
            delay_s = self._network.delay_s() + side * server_after_s
            close = partial(self.close, side, reason, tells=False)
            self._network.loop.call_later(delay_s, close, context=process.context)

    def close(self, side: int, reason: str, *, tells: bool = True) -> None:
        """End a side; if it `tells`, the other one learns of it. That one gets what is on its way, or not."""
        if not self.is_open[side]:
            return
        self.is_open[side] = False
        if side == 1:
            self.server.connections.remove(self)
            for served in list(self.server_calls):
                served.abandon()
        else:
            for call in list(self.client_calls):
                call.end((grpc.StatusCode.UNAVAILABLE, reason, ()))
        if self._network.rng.random() < 0.5:
            self.wire.drop(side)
        if tells:
            self.send(side, lambda: self.close(1 - side, reason))


class Channel:
    """A client's channel; see `grpc.aio.Channel`."""

    def __init__(self, network: Network, address: str) -> None:
        self.network, self.address = network, address
        self._connection: Connection | None = None

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, _: float | None = None) -> None:
        if self._connection is not None:
            for call in list(self._connection.client_calls):
                call.cancel()
            self._connection.close(0, "the channel was closed")

    async def connect(self, *, waits: bool) -> Connection:
        """Return an open connection; ConnectionError if nothing serves the address, or it does not answer."""
        network, client = self.network, current_process()
        deadline = network.loop.now + CONNECT_TIMEOUT_S
        while True:
            if self._connection is not None and self._connection.is_open[0]:
                return self._connection
            await asyncio.sleep(network.delay_s())
            server = network.find(self.address)
            if server is not None:
                connection = Connection(network, client, server)
                if not connection.is_mute:
                    if server is network.servers.get(self.address):
                        self._connection = connection
                    return connection
                server.connections.remove(connection)
            if not waits and (server is None or network.loop.now > deadline):
                raise ConnectionError("failed to connect to all addresses")
            await asyncio.sleep(RECONNECT_S)

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def call(request: Any = None, **options: Any) -> ClientCall:
            return ClientCall(self, path, request_serializer, response_deserializer, request, **options)

        return call

    unary_stream = unary_unary = stream_stream


class ClientCall:
    """The client's side of a call; see `grpc.aio.Call` and its subclasses."""

    def __init__(
        self,
        channel: Channel,
        path: str,
        serialise: Any,
        deserialise: Any,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = (),
        wait_for_ready: bool = False,
    ) -> None:
        self._channel, self._path = channel, path
        self._serialise, self._deserialise = serialise, deserialise
        self.metadata = tuple(metadata)
        self._loop = channel.network.loop
        self._inbox: deque[bytes] = deque()
        self._status: Status | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._outbox: list[bytes] = [] if request is None else [serialise(request)]
        self._connection: Connection | None = None
        self._served: ServerCall | None = None
        if timeout is not None:
            expired = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
            self._loop.call_later(timeout, self.cancel, expired)
        self._opening = asyncio.ensure_future(self._open(wait_for_ready))

    async def _open(self, waits: bool) -> None:
        try:
            connection = await self._channel.connect(waits=waits)
        except ConnectionError as error:
            self.end((grpc.StatusCode.UNAVAILABLE, str(error), ()))
            return
        if self._status is not None:
            return
        self._connection = connection
        connection.client_calls.append(self)
        connection.send(0, self._start)
        outbox, self._outbox = self._outbox, []
        for data in outbox:
            self._send(data)

    def _start(self) -> None:
        assert self._connection is not None
        self._served = ServerCall(self._channel.network, self._connection, self, self._path)

    def _send(self, data: bytes) -> None:
        if self._connection is None:
            self._outbox.append(data)
            return
        self._connection.send(0, lambda: self._served and self._served.receive(data))

    def receive(self, data: bytes) -> None:
        """Take a message of the server."""
        if self._status is None:
            self._inbox.append(data)
            self._wake()

    def end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
            if self._connection is not None and self in self._connection.client_calls:
                self._connection.client_calls.remove(self)
            self._wake()

    def cancel(self, status: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled", ())) -> bool:
        if self._status is not None:
            return False
        connection = self._connection
        self._inbox.clear()
        self.end(status)
        if connection is not None and connection.is_open[0]:
            connection.send(0, lambda: self._served and self._served.abandon())
        return True

    def done(self) -> bool:
        return self._status is not None

    async def write(self, message: Any) -> None:
        if self._status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self._send(self._serialise(message))
        await asyncio.sleep(0)

    async def read(self) -> Any:
        """Return the next message, or EOF at the end of a call; AioRpcError if it failed."""
        while not self._inbox and self._status is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._inbox:
            return self._deserialise(self._inbox.popleft())
        assert self._status is not None
        code, details, trailing = self._status
        if code is grpc.StatusCode.OK:
            return EOF
        metadata = grpc.aio.Metadata(*trailing)
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> ClientCall:
        return self

    async def __anext__(self) -> Any:
        if (message := await self.read()) is EOF:
            raise StopAsyncIteration
        return message

    def __await__(self) -> Any:
        return self.read().__await__()


class ServerCall:
    """The server's side of a call, and the context of its handler; see `grpc.aio.ServicerContext`."""

    def __init__(self, network: Network, connection: Connection, call: ClientCall, path: str) -> None:
        self._network, self._connection, self._call, self._path = network, connection, call, path
        self._status: Status | None = None
        self._requests: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._code, self._details, self._trailing = grpc.StatusCode.OK, "", ()
        connection.server_calls.append(self)
        handler = connection.server.methods[path]
        self._task = asyncio.ensure_future(self._serve(handler))

    def receive(self, data: bytes) -> None:
        self._requests.put_nowait(data)

    def abandon(self) -> None:
        """End the call: its client, or the connection, has gone."""
        self._requests.put_nowait(None)
        self._task.cancel()

    async def _serve(self, handler: Any) -> None:
        try:
            if handler.request_streaming:
                answers = handler.stream_stream(self._read(handler.request_deserializer), self)
            else:
                data = await self._requests.get()
                if data is None:
                    return
                request = handler.request_deserializer(data)
                method = handler.unary_stream if handler.response_streaming else handler.unary_unary
                answers = method(request, self)
            if handler.response_streaming:
                async for answer in answers:
                    self._answer(handler, answer)
                    await asyncio.sleep(0)
            else:
                self._answer(handler, await answers)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._code, self._details = grpc.StatusCode.UNKNOWN, repr(error)
            self._network.loop.errors.append(f"{self._path}: {error!r}")
        finally:
            if self in self._connection.server_calls:
                self._connection.server_calls.remove(self)
        status = self._code, self._details, tuple(self._trailing)
        self._connection.send(1, lambda: self._call.end(status))

    def _answer(self, handler: Any, answer: Any) -> None:
        self._network.on_answer(self._connection.server.process, self._path, answer)
        data = handler.response_serializer(answer)
        self._connection.send(1, lambda: self._call.receive(data))

    async def _read(self, deserialise: Any) -> AsyncIterator[Any]:
        while (data := await self._requests.get()) is not None:
            yield deserialise(data)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        self._code, self._details = code, details
        raise grpc.aio.AbortError(details)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._trailing = trailing

    def invocation_metadata(self) -> Any:
        return self._call.metadata

    def peer(self) -> str:
        return f"simulated:{self._connection.client.name}"

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}
