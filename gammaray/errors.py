"""Errors of gammaray, one class per cause.

    GammarayError
    ├── InvalidArgumentError      a field is wrong; names it, what was got and what is allowed
    ├── NotFoundError             no such model or session
    ├── UnauthenticatedError      no valid API key
    ├── ResourceExhaustedError    over a limit; `retry_after_s` says when to come back
    ├── FailedPreconditionError   a stale epoch, or a request that the session's state forbids
    │   └── ModelChangedError     the session is the text of a target model that is not served any more
    ├── DeadlineExceededError     it took longer than the caller allowed
    ├── UnavailableError          a worker or the cluster cannot be reached; retrying may help
    ├── TlsError                  TLS with the server fails; retrying does not help
    ├── CancelledError            the caller cancelled
    └── InternalError             a bug or a broken peer

Each class carries its gRPC status code and HTTP status; servers and clients map through these alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import grpc

__all__ = [
    "CancelledError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "GammarayError",
    "InternalError",
    "InvalidArgumentError",
    "ModelChangedError",
    "NotFoundError",
    "ResourceExhaustedError",
    "TlsError",
    "UnauthenticatedError",
    "UnavailableError",
    "error_class",
    "rendering",
]

_MAX_RENDERED = 4096
"""Characters from which on the rendering of a list or mapping is cut."""

_MAX_RENDERED_DEPTH = 100


class GammarayError(Exception):
    """Base of all errors raised by gammaray."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    http_status: ClassVar[int] = 500


class InvalidArgumentError(GammarayError):
    """A field of a request or a setting is wrong.

    Attributes:
        field: Name of the field, dotted for nested ones.
        got: Short rendering of the value.
        allowed: What would be accepted.
    """

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, got: object, allowed: str) -> None:
        rendered = got if isinstance(got, str) else rendering(got)
        self.field, self.got, self.allowed = _shorten(field), _shorten(rendered), allowed
        super().__init__(f"{self.field}: got {self.got}, allowed: {allowed}")


class NotFoundError(GammarayError):
    """No such model or session.

    Args:
        message: What is missing.
        kind: "model" or "session"; "" as far as a client knows.
    """

    status = grpc.StatusCode.NOT_FOUND
    http_status = 404

    def __init__(self, message: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(message)


class UnauthenticatedError(GammarayError):
    """No valid API key was given."""

    status = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401


class ResourceExhaustedError(GammarayError):
    """A limit is reached; come back after `retry_after_s` seconds."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class FailedPreconditionError(GammarayError):
    """The state of a session forbids the call, for example a stale epoch."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 409


class ModelChangedError(FailedPreconditionError):
    """The session is the text of a target model that is not served (any more); begin another session.

    Attributes:
        session_id: The session.
        began: Identity of the model it was begun with.
        serving: Identities of those that would have gone on; an empty one is not known.
    """

    def __init__(self, session_id: str, began: str, serving: Iterable[str]) -> None:
        self.session_id, self.began, self.serving = session_id, began, tuple(serving)
        others = ", ".join(identity or "one that is not known" for identity in self.serving)
        super().__init__(
            f"session {session_id} was begun with the target model {began} and cannot go on with {others}"
        )


class DeadlineExceededError(GammarayError):
    """The call took longer than the caller allowed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504


class UnavailableError(GammarayError):
    """A worker or the cluster cannot be reached; retrying may help."""

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503


class TlsError(GammarayError):
    """TLS with the server fails, because of a certificate or because one side speaks plain text.

    Raised by clients; it is not retried, since only other certificates or other options help.

    Attributes:
        address: The server, host:port or a URL.
        cause: What is wrong.
        remedy: What to do, with the option of the command line and the argument of the clients.
    """

    status = grpc.StatusCode.UNAVAILABLE
    http_status = 503

    def __init__(self, address: str, cause: str, remedy: str) -> None:
        self.address, self.cause, self.remedy = address, cause, remedy
        super().__init__(f"{address}: {cause}; {remedy}")


class CancelledError(GammarayError):
    """The caller cancelled."""

    status = grpc.StatusCode.CANCELLED
    http_status = 499


class InternalError(GammarayError):
    """A bug, or a peer that breaks the protocol."""

    status = grpc.StatusCode.INTERNAL
    http_status = 500


_BY_STATUS: dict[grpc.StatusCode, type[GammarayError]] = {
    cls.status: cls
    for cls in (
        NotFoundError,
        UnauthenticatedError,
        ResourceExhaustedError,
        FailedPreconditionError,
        DeadlineExceededError,
        UnavailableError,
        CancelledError,
        InternalError,
    )
}


def error_class(status: grpc.StatusCode) -> type[GammarayError]:
    """Return the class for a gRPC status; GammarayError when there is none of its own.

    InvalidArgumentError is not among them: it is rebuilt from the status details.
    """
    return _BY_STATUS.get(status, GammarayError)


def rendering(value: object) -> str:
    """Return `repr(value)`; of a list or mapping with a long one, its first characters.

    A request may hold millions of values; their full `repr` would take a second and tens of megabytes, of
    which an error message shows 80 characters.
    """
    if not isinstance(value, (list, tuple, dict)):
        return repr(value)
    parts: list[str] = []
    size = 0
    for part in _parts(value, 0):
        if size > _MAX_RENDERED or part is None:
            return f"{''.join(parts)[:80]}... (over {size} characters)"
        parts.append(part)
        size += len(part)
    return "".join(parts)


def _parts(value: object, depth: int) -> Iterator[str | None]:
    """Yield the pieces of a value's `repr`; None in place of what is nested too deep."""
    if depth > _MAX_RENDERED_DEPTH:
        yield None
    elif isinstance(value, dict):
        yield "{"
        for index, (key, entry) in enumerate(value.items()):
            yield f"{', ' if index else ''}{key!r}: "
            yield from _parts(entry, depth + 1)
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "[" if isinstance(value, list) else "("
        for index, entry in enumerate(value):
            if index:
                yield ", "
            yield from _parts(entry, depth + 1)
        if isinstance(value, list):
            yield "]"
        else:
            yield ",)" if len(value) == 1 else ")"
    else:
        yield repr(value)


def _shorten(text: str, limit: int = 80) -> str:
    # Unpaired surrogates would make the message impossible to send or print.
    text = text.encode(errors="backslashreplace").decode()
    # The margin lets a shortened text pass unchanged: errors are rebuilt on the other side of the wire.
    return text if len(text) <= limit + 40 else f"{text[:limit]}... ({len(text)} characters)"
