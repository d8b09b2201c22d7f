"""Connections of orchestrators and workers to Redis: URLs, retries, and failover to another primary.

A URL is one of

    redis://[[user]:password@]host[:port][/db]                  a server, or a name that leads to the primary
    rediss://...                                                 the same over TLS
    unix://[[user]:password@]/path[?db=db]                       a server on this machine
    redis+sentinel://[[user]:password@]host[:port][,host2[:port2]...]/service[/db]
    rediss+sentinel://...                                        the same over TLS

with redis-py's options as query, for example `ssl_ca_certs`. With Sentinel, the hosts are sentinels; user and
password are those of the Redis servers, `sentinel_username` and `sentinel_password` in the query those of the
sentinels.

A server that was demoted, is loading or has lost its primary answers commands with an error but keeps the
connection open. After such a reply the pool closes all connections and the command is retried over a new one,
for which the name is resolved, or Sentinel queried, again.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis, Sentinel
from redis.asyncio.connection import Connection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from gammaray.errors import InvalidArgumentError

T = TypeVar("T")

ALLOWED_URLS = (
    "redis://host:port/db, rediss://..., unix://path, redis+sentinel://host:port,host2:port2/service/db or "
    "rediss+sentinel://..."
)

FAILOVER = frozenset({"READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "NOREPLICAS"})
"""Codes of error replies after which another server may be the primary."""

PASSING = FAILOVER | {"BUSY"}
"""Codes of error replies after which a command is retried: it was not executed."""

BACKOFF_BASE_S, BACKOFF_CAP_S = 0.05, 0.5
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 0.25
"""Timeout per sentinel, in seconds: a call with a timeout of 1 s can skip several silent sentinels."""

_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}

# redis-py strips the code from the messages of errors with a class of their own. Subclasses come first.
_CODES: tuple[tuple[type[RedisError], str], ...] = (
    (ReadOnlyError, "READONLY"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (TryAgainError, "TRYAGAIN"),
    (BusyLoadingError, "LOADING"),
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
    (NoScriptError, "NOSCRIPT"),
    (AuthenticationError, "NOAUTH"),
    (AuthorizationError, "NOAUTH"),
)

# Redis up to 6.2 wraps the error of a command in a script:
# "Error running script (call to f_1b5c...): @user_script:9: @user_script: 9: -READONLY You can't write ..."
_CODE = re.compile(r"(?:Error running script .*? -)?(?P<code>[A-Z]{3,}) ", re.DOTALL)


class RefusedError(ConnectionError):
    """Redis answered with a temporary error; the command was not executed, and retries did not help.

    Attributes:
        code: First word of the reply, in upper case.
    """

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message if code in message else f"{code} {message}")


def reply_code(error: BaseException) -> str:
    """Return the code of an error reply, such as "OOM", also from within a script; empty if there is none."""
    if isinstance(error, RefusedError):
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    found = _CODE.match(str(error)) if isinstance(error, ResponseError) else None
    return found["code"] if found else ""


def without_password(redis_url: str) -> str:
    """Return a URL with its password removed, for display."""
    start, end = redis_url.find("//"), redis_url.rfind("@")
    shown = redis_url if not 0 <= start < end else f"{redis_url[:start]}//...{redis_url[end:]}"
    return re.sub(r"(password=)[^&]*", r"\1...", shown)


def connect(redis_url: str, *, timeout_s: float, num_retries: int, max_connections: int = 2) -> Redis:
    """Return a client, which connects on first use.

    Args:
        redis_url: See the module docstring.
        timeout_s: Upper bound of one attempt to connect, of the wait for one reply, and of the wait for one
            of the connections, in seconds.
        num_retries: Retries of a command while Redis cannot be reached or refuses it temporarily; the delay
            grows from 0.05 s to 0.5 s.
        max_connections: Upper bound of connections; calls wait for a free one.

    Raises:
        InvalidArgumentError: The URL is not a Redis URL.
    """
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": timeout_s,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": _Retry(num_retries),
    }
    try:
        parts = urlsplit(redis_url)
        if parts.scheme in _SENTINEL_SCHEMES:
            return _connect_by_sentinel(parts, options)
        options.update(parse_url(redis_url))
        options["connection_class"] = _following(options.get("connection_class", Connection))
        return _client(_Pool(**options))
    except (TypeError, ValueError) as error:  # TypeError: an option that redis-py does not know
        raise InvalidArgumentError("redis_url", without_password(redis_url), ALLOWED_URLS) from error


def address_of(redis: Redis) -> str:
    """Return the host:port or path of the server that a client of `connect` uses, as far as known."""
    pool = redis.connection_pool
    if isinstance(pool, _SentinelPool):
        host, port = pool.master_address or (f"sentinel {pool.service_name}", "")
        return f"{host}:{port}" if port else str(host)
    where = pool.connection_kwargs
    return str(where["path"]) if "path" in where else f"{where.get('host', '')}:{where.get('port', 6379)}"


def _connect_by_sentinel(parts: SplitResult, options: dict[str, Any]) -> Redis:
    credentials, at, hosts = parts.netloc.rpartition("@")
    nodes = [urlsplit(f"//{host}") for host in hosts.split(",")]
    service, _, db = parts.path.strip("/").partition("/")
    if not service or not all(node.hostname for node in nodes):
        raise ValueError("a sentinel URL names hosts and a service")
    int(db or 0)
    server = SplitResult(
        _SENTINEL_SCHEMES[parts.scheme], f"{credentials}{at}host", f"/{db or 0}", parts.query, ""
    )
    options.update(parse_url(urlunsplit(server)))
    del options["host"]
    is_tls = options.pop("connection_class", Connection) is SSLConnection
    options["connection_class"] = _following(
        SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
    )
    sentinel_options: dict[str, Any] = {
        "socket_timeout": SENTINEL_TIMEOUT_S,
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),  # the next sentinel is queried instead
        "username": options.pop("sentinel_username", None),
        "password": options.pop("sentinel_password", None),
    }
    if is_tls:
        tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
        sentinel_options.update(tls, ssl=True)
    addresses = [(str(node.hostname), node.port or SENTINEL_PORT) for node in nodes]
    sentinel = Sentinel(addresses, sentinel_kwargs=sentinel_options)  # type: ignore[no-untyped-call]
    return _client(_SentinelPool(unquote(service), sentinel, **options))  # type: ignore[no-untyped-call]


def _client(pool: Any) -> Redis:
    """Return a client; reject invalid options of the URL now rather than at the first connection."""
    pool.connection_class(**pool.connection_kwargs)
    return Redis.from_pool(pool)


class _Retry(Retry):
    """Retry policy that does not retry connecting on its own while a command is being retried.

    Otherwise the counts would multiply. Each connection copies this object, and runs one command at a time.
    """

    def __init__(self, num_retries: int) -> None:
        errors = (ConnectionError, TimeoutError)
        super().__init__(ExponentialBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), num_retries, errors)
        self._once = Retry(NoBackoff(), 0, errors)
        self._is_retrying = False

    async def call_with_retry(self, do: Callable[[], Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        """Call `do` until it succeeds or the retries are exhausted; see `redis.asyncio.retry.Retry`."""
        if self._is_retrying:
            return await self._once.call_with_retry(do, *args, **kwargs)
        self._is_retrying = True
        try:
            return await super().call_with_retry(do, *args, **kwargs)
        finally:
            self._is_retrying = False


class _Following:
    """A connection that treats temporary error replies as a broken connection, to have commands retried."""

    on_failover: Callable[[], Awaitable[None]]
    is_stale = False
    """Whether to close the connection before it is used again."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        """Send a command. Sentinel is queried at every connect; redis-py does so only in the pool."""
        if isinstance(self, SentinelManagedConnection) and not self.is_connected:
            await self.connect()
        await super().send_packed_command(*args, **kwargs)  # type: ignore[misc]

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """Return a reply.

        Raises:
            RefusedError: One of `PASSING`.
            RedisError: Another error reply, or the connection broke.
        """
        try:
            return await super().read_response(*args, **kwargs)  # type: ignore[misc]
        except RedisError as error:
            code = reply_code(error)
            # With Sentinel, redis-py turns the reply of a demoted primary into a ConnectionError itself.
            is_demoted = isinstance(self, SentinelManagedConnection) and isinstance(error, ConnectionError)
            if code in FAILOVER or is_demoted:
                await self.on_failover()
            if code in PASSING:
                raise RefusedError(code, str(error)) from error
            raise


@cache
def _following(kind: type) -> type:
    """Return one of redis-py's classes of connections with the behaviour of `_Following`."""
    return type(f"Following{kind.__name__}", (_Following, kind), {})


class _Pool(BlockingConnectionPool):
    """Connections to one server, or to the server that its name resolves to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def make_connection(self) -> Any:
        """Return a new connection."""
        connection: Any = super().make_connection()  # type: ignore[no-untyped-call]
        connection.on_failover = self.follow
        self._made.add(connection)
        return connection

    async def follow(self) -> None:
        """Close every connection, those in use on release, since another server may be the primary."""
        for connection in self._made:
            connection.is_stale = True
        await self.disconnect(inuse_connections=False)

    async def release(self, connection: Any) -> None:
        """Return a connection to the pool."""
        if connection.is_stale:
            connection.is_stale = False
            await connection.disconnect()
        await super().release(connection)


class _SentinelPool(SentinelConnectionPool, _Pool):
    """Connections to the primary according to Sentinel."""

    async def aclose(self) -> None:
        """Close the connections to the primary and to the sentinels."""
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()
