"""Conversion between gammaray's errors and gRPC statuses with google.rpc details, in both directions.

A status carries at most one detail: BadRequest for InvalidArgumentError (the field, its value, what is
allowed), RetryInfo for ResourceExhaustedError (when to retry), and PreconditionFailure for ModelChangedError
(one violation per model that is served instead).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from gammaray.errors import (
    ERROR_CLASSES,
    GammarayError,
    InvalidArgumentError,
    ModelChangedError,
    ResourceExhaustedError,
)

DETAILS_KEY = "grpc-status-details-bin"
"""Trailing metadata that holds the serialised google.rpc.Status."""

MAX_MESSAGE_BYTES = 1000
"""Upper bound of a message in UTF-8, which is sent twice: as text (three bytes for one) and in details."""

MODEL_CHANGED = "MODEL_CHANGED"
"""Type of a violation; its description is the session's model, a space, and a served model."""

MAX_VIOLATIONS = 4
"""Upper bound of violations per status, which is sent in headers of limited size."""

_PROXY_FAILED = re.compile(r"Received http2 header with status: 5\d\d")
"""What gRPC says of an HTTP error instead of an answer. Ray Serve's HAProxy sends 500 in place of 502, 503
and 504, when no replica can be reached; gRPC takes those three for UNAVAILABLE, but 500 for UNKNOWN."""

_NOT_GRPC = re.compile(r"Received http2 header with status: [34]\d\d|http1\.x server")
_NO_TLS = "WRONG_VERSION_NUMBER"
"""What gRPC says of an endpoint that speaks HTTP alone, or no TLS."""

_Detail = TypeVar("_Detail", bound=Message)

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_VIOLATION = re.compile(r"got (?P<got>.*), allowed: (?P<allowed>.*)", re.DOTALL)
_MESSAGE = re.compile(rf"(?P<field>[^:]+): {_VIOLATION.pattern}", re.DOTALL)


def error_to_status(error: GammarayError) -> status_pb2.Status:
    """Return the status of an error; servers send it, serialised, as trailing metadata `DETAILS_KEY`.

    The call itself must end with `error.status` and the status's message: `str(error)`, truncated to what
    headers may hold, since proxies close the connection if headers are longer.
    """
    status = status_pb2.Status(code=error.status.value[0], message=_cut(str(error)))
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=f"got {error.got}, allowed: {error.allowed}"
        )
        _attach(status, error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, ResourceExhaustedError):
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        _attach(status, error_details_pb2.RetryInfo(retry_delay=delay))
    elif isinstance(error, ModelChangedError):
        violations = [
            error_details_pb2.PreconditionFailure.Violation(
                type=MODEL_CHANGED, subject=error.session_id, description=f"{error.began} {serving}"
            )
            for serving in error.serving[:MAX_VIOLATIONS]
        ]
        _attach(status, error_details_pb2.PreconditionFailure(violations=violations))
    return status


def _cut(text: str) -> str:
    data = text.encode(errors="backslashreplace")
    if len(data) <= MAX_MESSAGE_BYTES:
        return data.decode()
    return f"{data[:MAX_MESSAGE_BYTES].decode(errors='ignore')}... ({len(text)} characters)"


def error_from_status(status: status_pb2.Status) -> GammarayError:
    """Rebuild the error that a status describes; missing or malformed details are ignored."""
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    message = status.message or f"the server ended the call with {code.name} and no message"
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return _invalid_argument(status, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        info = _detail(status, error_details_pb2.RetryInfo)
        if info is not None and info.HasField("retry_delay"):
            return ResourceExhaustedError(message, info.retry_delay.ToNanoseconds() / 1e9)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        failure = _detail(status, error_details_pb2.PreconditionFailure)
        if failure is not None and any(v.type == MODEL_CHANGED for v in failure.violations):
            return _model_changed(failure)
    cls = ERROR_CLASSES.get(code, GammarayError)
    # The base class represents several codes, so the message names the code.
    return cls(message) if cls is not GammarayError else cls(f"{code.name}: {message}")


def error_from_rpc(error: grpc.aio.AioRpcError) -> GammarayError:
    """Return the error of a failed call: from its rich status if there is one, else from its code."""
    code = error.code()
    if code is grpc.StatusCode.UNKNOWN and _PROXY_FAILED.match(error.details() or ""):
        code = grpc.StatusCode.UNAVAILABLE
    details = error.details() or ""
    if _NOT_GRPC.search(details):
        details += " (is it the gRPC API, on port 9000 by default? an HTTP server answers)"
    elif _NO_TLS in details:
        details += " (it does not use TLS)"
    plain = status_pb2.Status(code=code.value[0], message=details)
    for key, value in _trailers(error):
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                rich = status_pb2.Status.FromString(value)
            except DecodeError:
                break
            # A rich status that contradicts the call's code comes from another source and is ignored.
            if rich.code == plain.code:
                return error_from_status(rich)
    return error_from_status(plain)


def code_of(error: GammarayError) -> grpc.StatusCode | None:
    """Return the status code of the call of an `error_from_rpc` error; None for other errors."""
    failure = error.__cause__
    return failure.code() if isinstance(failure, grpc.aio.AioRpcError) else None


def is_from_gammaray(error: GammarayError) -> bool:
    """Whether an error of `error_from_rpc` was sent by gammaray itself, and not by a proxy."""
    failure = error.__cause__
    if not isinstance(failure, grpc.aio.AioRpcError):
        return False
    return any(key == DETAILS_KEY for key, _ in _trailers(failure))


def _trailers(failure: grpc.aio.AioRpcError) -> Iterable[tuple[str, str | bytes]]:
    # The type stubs are wrong: the library yields pairs.
    return cast("Iterable[tuple[str, str | bytes]]", failure.trailing_metadata() or ())


def _invalid_argument(status: status_pb2.Status, message: str) -> InvalidArgumentError:
    request = _detail(status, error_details_pb2.BadRequest)
    if request is None or not request.field_violations:
        # Workers send only the message, which contains the same three parts.
        if match := _MESSAGE.fullmatch(message):
            return InvalidArgumentError(match["field"], match["got"], match["allowed"])
        return InvalidArgumentError("request", message, "see the message")
    violation = request.field_violations[0]
    if match := _VIOLATION.match(violation.description, max(0, violation.description.find("got "))):
        return InvalidArgumentError(violation.field, match["got"], match["allowed"])
    return InvalidArgumentError(violation.field, violation.description or message, "see the message")


def _model_changed(failure: error_details_pb2.PreconditionFailure) -> ModelChangedError:
    found = [violation for violation in failure.violations if violation.type == MODEL_CHANGED]
    pairs = [violation.description.partition(" ") for violation in found]
    return ModelChangedError(found[0].subject, pairs[0][0], [serving for _, _, serving in pairs])


def _attach(status: status_pb2.Status, detail: Message) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _detail(status: status_pb2.Status, cls: type[_Detail]) -> _Detail | None:
    for packed in status.details:
        found = cls()
        try:
            if packed.Unpack(found):
                return found
        except DecodeError:
            continue
    return None
