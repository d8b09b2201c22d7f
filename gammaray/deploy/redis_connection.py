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
connection open. After such a reply the client closes all connections and sends the command again over a new
one, for which the name is resolved, or Sentinel queried, again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis, Sentinel
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import AuthenticationError, ConnectionError, RedisError, ResponseError

from gammaray.checks import join_address
from gammaray.errors import InvalidArgumentError, UnavailableError

T = TypeVar("T")

_log = logging.getLogger(__name__)

OLDEST_VERSION, SUPPORTED_SERVERS = (6, 2), "Redis 6.2 or newer, or Valkey 7.2 or newer"
"""Valkey gives the version of Redis that it is compatible with, too: 7.2.4."""

_CLOSED = "; the handler is closed"
"""End of uvloop's RuntimeError for a write to an idle connection that was reset."""
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

# Redis up to 6.2 wraps the error of a command in a script:
# "Error running script (call to f_1b5c...): @user_script:9: @user_script: 9: -READONLY You can't write ..."
_CODE = re.compile(r"(?:Error running script .*? -)?(?P<code>[A-Z]{3,}) ", re.DOTALL)


class RefusedError(ConnectionError):
    """Redis refused a command, which it did not execute, with a temporary error that begins with `code`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message if code in message else f"{code} {message}", status_code=code)


def reply_code(error: BaseException) -> str:
    """Return the code of an error reply, such as "OOM", also from within a script; empty if there is none."""
    if isinstance(error, RedisError) and error.status_code not in (None, "ERR"):
        return error.status_code  # redis-py has taken it out of the message
    found = _CODE.match(str(error)) if isinstance(error, ResponseError) else None
    return found["code"] if found else ""


def without_password(redis_url: str) -> str:
    """Return a URL with its password removed, for display."""
    start, end = redis_url.find("//"), redis_url.rfind("@")
    shown = redis_url if not 0 <= start < end else f"{redis_url[:start]}//...{redis_url[end:]}"
    return re.sub(r"(password=)[^&]*", r"\1...", shown)


class RetryingRedis(Redis):
    """A client whose calls are repeated while Redis cannot be reached or refuses them temporarily.

    A single policy covers connecting and sending; with policies of connections their counts would multiply.
    """

    policy: Retry

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self.repeated(partial(super().execute_command, *args, **options))

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call` until it succeeds or the retries are exhausted.

        RefusedError if Redis refused it with one of `PASSING`. UnavailableError, at once, if no connection
        became free in time or the password is wrong. RedisError for another error reply, or if Redis cannot
        be reached.
        """

        async def attempt() -> T:
            try:
                return await call()
            except AuthenticationError as error:
                raise UnavailableError(f"Redis refuses the password: {error}") from error
            except RuntimeError as error:
                if not str(error).endswith(_CLOSED):
                    raise
                raise ConnectionError(f"the connection was reset: {error}") from error
            except RedisError as error:
                if isinstance(error, ConnectionError) and isinstance(error.__cause__, asyncio.TimeoutError):
                    raise UnavailableError(f"Redis does not respond: {error}") from error
                code = reply_code(error)
                if code in FAILOVER:
                    await self._follow()
                if code in PASSING:
                    raise RefusedError(code, str(error)) from error
                raise

        async def failed(_: Exception) -> None:
            """The connection is closed, or back in the pool."""

        return await self.policy.call_with_retry(attempt, failed)

    async def _follow(self) -> None:
        """Close every connection, those in use on release, since another server may be the primary."""
        await self.connection_pool.update_active_connections_for_reconnect()  # type: ignore[no-untyped-call]
        await self.connection_pool.disconnect(inuse_connections=False)


def connect(redis_url: str, *, timeout_s: float, num_retries: int, max_connections: int = 2) -> RetryingRedis:
    """Return a client, which connects on first use, for a URL as in the module's docstring.

    One attempt to connect, the wait for a reply, and that for one of at most `max_connections` take
    `timeout_s` each at most. Commands are retried while Redis cannot be reached or refuses them temporarily,
    after delays from 0.05 s to 0.5 s.
    """
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": timeout_s,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,  # with the third, redis-py takes two more round trips to open a connection
    }
    try:
        parts = urlsplit(redis_url)
        if parts.scheme in _SENTINEL_SCHEMES:
            pool: Any = _sentinel_pool(parts, options)
        else:
            pool = BlockingConnectionPool(**{**options, **parse_url(redis_url)})
        pool.connection_class(**pool.connection_kwargs)  # rejects invalid options of the URL
    except (TypeError, ValueError) as error:  # TypeError: an option that redis-py does not know
        raise InvalidArgumentError("redis_url", without_password(redis_url), ALLOWED_URLS) from error
    redis = cast(RetryingRedis, RetryingRedis.from_pool(pool))
    redis.policy = Retry(ExponentialBackoff(cap=BACKOFF_CAP_S, base=BACKOFF_BASE_S), num_retries)
    return redis


async def check_server(redis: Redis, redis_url: str) -> None:
    """Raise InvalidArgumentError if a server is a node of a Redis Cluster, or too old."""
    shown = without_password(redis_url)
    try:
        info = await redis.info()
    except (RedisError, UnavailableError, OSError) as error:  # an ACL may forbid INFO, or the server lacks it
        _log.warning("failed to check the version and kind of %s: %s", shown, error)
        return
    version = str(info.get("redis_version", ""))
    if (numbers := tuple(map(int, re.findall(r"\d+", version)))) and numbers < OLDEST_VERSION:
        raise InvalidArgumentError("redis_url", f"{shown}, Redis {version}", SUPPORTED_SERVERS)
    if int(info.get("cluster_enabled", 0)):
        raise InvalidArgumentError(
            "redis_url",
            f"{shown}, a node of a Redis Cluster",
            "a server without cluster mode, with or without replicas: sessions and indexes need one node",
        )


def address_of(redis: Redis) -> str:
    """Return the host:port or path of the server that a client of `connect` uses, as far as known."""
    pool = redis.connection_pool
    if isinstance(pool, _SentinelPool):
        host, port = pool.master_address or (f"sentinel {pool.service_name}", "")
        return join_address(host, port) if port else str(host)
    where = pool.connection_kwargs
    if "path" in where:
        return str(where["path"])
    return join_address(where.get("host", ""), where.get("port", 6379))


def hosts_of(redis_url: str) -> list[str]:
    """Return the hosts in a valid URL: the server's or the sentinels'; none for a Unix socket."""
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return []
    nodes = parts.netloc.rpartition("@")[2].split(",")
    return [urlsplit(f"//{node}").hostname or "localhost" for node in nodes]


def _sentinel_pool(parts: SplitResult, options: dict[str, Any]) -> _SentinelPool:
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
    is_tls = options.get("connection_class") is SSLConnection
    options["connection_class"] = SentinelManagedSSLConnection if is_tls else SentinelManagedConnection
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
    return _SentinelPool(unquote(service), sentinel, **options)  # type: ignore[no-untyped-call]


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary according to Sentinel; calls wait for a free one."""

    async def aclose(self) -> None:
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()
