"""Transport of all client calls: metadata, deadline, retries and error mapping."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from gammaray.aio import num_cancellations
from gammaray.checks import check_api_key, check_timeout, is_address, is_loopback
from gammaray.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, UnavailableError
from gammaray.security.client_tls import ClientTls
from gammaray.v1.generation_service_pb2_grpc import GenerationServiceStub
from gammaray.wire.metadata import APPLICATION, MAX_TIMEOUT_MS, TIMEOUT_HEADER, trace_metadata
from gammaray.wire.rpc_errors import error_from_rpc

CHANNEL_OPTIONS = (
    # A peer that disappears without closing (a cut cable, a killed machine) is detected within 40 seconds;
    # TCP alone takes many minutes. Servers forbid more frequent pings on idle connections.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # for the answer; 60 s by default
    # gRPC's default backoff of up to two minutes is far longer than a proxy or replica takes to restart.
    ("grpc.max_reconnect_backoff_ms", 500),
    # A long completion with twenty log-probabilities per token exceeds the default of 4 MiB.
    ("grpc.max_receive_message_length", 64 * 2**20),
)

_PASSING = (UnavailableError, CancelledError, DeadlineExceededError)
_SCHEME = re.compile(r"(?P<scheme>https|grpcs|grpc)://(?P<place>[^/?#@\s]+)/?")
_ADDRESS = re.compile(r"(?!(?:https?|grpcs?)://)(?:\S*[/\[\]])?[^\s/\[\]]+\]?:(?P<port>[0-9]{1,5})|unix:\S+")
_ALLOWED = "host:port, with an IPv6 host in brackets, or https://host:port for TLS"
_TLS_PORT = 443


@dataclass(frozen=True)
class RetryPolicy:
    """Number and delays of retries of failed calls."""

    # Attempts in total, including the first, at a cluster that has never answered. 1: calls are never
    # retried, and streams not resumed.
    max_attempts: int = 5
    initial_delay_s: float = 0.2  # upper bound of the first delay; it doubles with each further one
    max_delay_s: float = 1.0  # upper bound of every delay
    resume_s: float = 60.0  # once the cluster has answered: how long to retry a completion without progress

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgumentError("max_attempts", self.max_attempts, "at least 1")

    def delay_s(self, attempt: int) -> float:
        """Return the delay after attempt number `attempt` (from 0), with jitter to spread clients out."""
        return min(self.max_delay_s, self.initial_delay_s * 2.0 ** min(attempt, 64)) * random.uniform(
            0.5, 1.0
        )


class Transport:
    """A channel to one endpoint, opened at the first call, in the event loop of that call.

    `api_key` is sent as bearer token, `timeout_s` the default deadline of calls, and `credentials` are made
    from `tls` if they are None; without both it is plain text. `has_answered` tells whether the cluster has
    ever answered a call. InvalidArgumentError for a malformed address, key or timeout.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None,
        timeout_s: float,
        retry: RetryPolicy,
        credentials: grpc.ChannelCredentials | None,
        tls: ClientTls | None = None,
    ) -> None:
        self.address, needs_tls = _parsed(address)
        if needs_tls is False and (tls or credentials):
            raise InvalidArgumentError("address", f"{address} with TLS options", _ALLOWED)
        self._metadata = [("application", APPLICATION)]
        if api_key is not None:
            check_api_key(api_key)
            self._metadata.append(("authorization", f"Bearer {api_key}"))
        self._timeout_s = check_timeout("timeout_s", timeout_s)
        self.retry = retry
        self._credentials = credentials if tls is None else tls.channel_credentials()
        self._channel: grpc.aio.Channel | None = None
        self._stub: GenerationServiceStub | None = None
        self.is_closed = False
        self.has_answered = False

    def deadline(self, timeout_s: float | None) -> float:
        """Return the deadline, as `time.monotonic()`, of a call that starts now; None: the default one."""
        return time.monotonic() + check_timeout(
            "timeout_s", self._timeout_s if timeout_s is None else timeout_s
        )

    async def attempt(self, method: str, request: object, deadline: float) -> AsyncGenerator[Any, None]:
        """Call `method` once and yield its messages; closing the generator cancels the call."""
        left_s = deadline - time.monotonic()
        # Ray Serve does not pass the call's deadline on to its replicas.
        timeout = (TIMEOUT_HEADER, str(min(max(1, round(left_s * 1000)), MAX_TIMEOUT_MS)))
        metadata = [*self._metadata, timeout, *trace_metadata()]
        call = self._rpc(method)(request, timeout=left_s, metadata=metadata)
        try:
            async for message in _only(call) if isinstance(call, grpc.aio.UnaryUnaryCall) else call:
                self.has_answered = True
                yield message
        except asyncio.CancelledError:
            # Closing the channel also raises CancelledError in its calls, without a cancelled task.
            if self.is_closed:
                raise CancelledError("the client was closed") from None
            raise
        except grpc.aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure
        finally:
            call.cancel()

    async def unary(self, method: str, request: object, timeout_s: float | None = None) -> Any:
        """Call `method` of the service, which must be idempotent, and return its only message.

        A call that fails with UNAVAILABLE is retried within its deadline. So is one that was cancelled by
        another party than the caller, which is how a proxy reports a replica that died. An attempt may take
        half of the time that is left: a proxy may pass it to a replica that stops and never answers. The
        GammarayError of a failure is the subclass that fits its status.
        """
        deadline, attempt = self.deadline(timeout_s), 0
        while True:
            asked_to_end = num_cancellations()
            is_last = attempt + 1 >= self.retry.max_attempts
            half = (time.monotonic() + deadline) / 2
            try:
                async with aclosing(self.attempt(method, request, deadline if is_last else half)) as messages:
                    return await anext(messages)
            except _PASSING as error:
                if num_cancellations() > asked_to_end:
                    raise asyncio.CancelledError from error
                delay_s = self.retry.delay_s(attempt)
                attempt += 1
                has_time = time.monotonic() + delay_s < deadline and attempt < self.retry.max_attempts
                if self.is_closed or not has_time:
                    raise
            await self.pause(delay_s)

    async def pause(self, delay_s: float) -> None:
        """Wait before the next attempt of a call; CancelledError if the client is closed meanwhile."""
        await asyncio.sleep(delay_s)
        if self.is_closed:
            raise CancelledError("the client was closed")

    async def close(self) -> None:
        """Close the channel; calls in flight are cancelled."""
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close(None)

    def _rpc(self, method: str) -> Any:
        if self.is_closed:
            raise RuntimeError("the client is closed")
        if self._stub is None:
            self._channel = self._dial()
            self._stub = GenerationServiceStub(self._channel)
        return getattr(self._stub, method)

    def _dial(self) -> grpc.aio.Channel:
        # A proxy of the environment cannot reach servers of this machine.
        is_own = self.address.startswith("unix:") or is_loopback(self.address.rpartition(":")[0])
        options = (*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(not is_own)))
        if self._credentials is None:
            return grpc.aio.insecure_channel(self.address, options)
        return grpc.aio.secure_channel(self.address, self._credentials, options)


async def _only(call: Any) -> AsyncIterator[Any]:
    yield await call


def _parsed(address: str) -> tuple[str, bool | None]:
    """Return gRPC's target, and whether the scheme implies TLS."""
    needs_tls, target = None, address
    if scheme := _SCHEME.fullmatch(address):
        needs_tls, target = scheme["scheme"] != "grpc", scheme["place"]
        if needs_tls and not re.search(r":[0-9]+$", target):
            target = f"{target}:{_TLS_PORT}"
    match = _ADDRESS.fullmatch(target)
    if match is None or is_address(target):  # one of IPv6 whose last group may be meant as port
        raise InvalidArgumentError("address", address, _ALLOWED)
    if match["port"] is not None and not 1 <= int(match["port"]) <= 65535:
        raise InvalidArgumentError("address", address, f"{_ALLOWED}, with a port from 1 to 65535")
    return target, needs_tls
