"""Errors as OpenAI's error object, with their HTTP statuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar

import grpc
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

from gammaray.errors import (
    CancelledError,
    GammarayError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    rendering,
)
from orchestrator.api.http.response_types import Error, ErrorType
from orchestrator.sessions.lifecycle import ContextLengthError

_logger = logging.getLogger(__name__)

STATUSES = {
    400: "An invalid field (named by `param`), malformed JSON, or invalid UTF-8.",
    401: "No valid API key.",
    403: "Without API keys: a request for another host, or from a page of another site.",
    404: "Unknown model, path, session or response.",
    405: "Method not allowed for this path.",
    408: "The body took too long to arrive.",
    409: "The session is in another state, or its target model is no longer served.",
    413: "The body is too large.",
    415: "The body's content type is not application/json.",
    429: "A limit is exceeded; `Retry-After` has the delay.",
    500: "An internal error.",
    503: "No target worker or Redis is available; retry after the delay in `Retry-After`.",
    504: "The deadline is exceeded.",
}
"""Meaning of each status of a failed request."""

_LASTING = "lasting"
_TYPES: dict[int, ErrorType] = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {
    401: "invalid_api_key",
    413: "request_too_large",
    429: "rate_limit_exceeded",
}
# Fields whose HTTP name differs from that of the request type.
_HTTP_NAMES = {
    "verification": "gammaray.verification",
    "drafter": "gammaray.drafter",
    "gamma": "gammaray.gamma",
    "max_gamma": "gammaray.max_gamma",
    "max_nodes": "gammaray.max_nodes",
    "session_id": "gammaray.session_id",
    "turn": "gammaray.turn",
    "keep_cache_s": "gammaray.keep_cache_s",
    "cache_salt": "gammaray.cache_salt",
    "num_top_logprobs": "top_logprobs",
    "num_prompt_logprobs": "prompt_logprobs",
}


class BodyTooLargeError(GammarayError):
    """A request body is above the limit."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status: ClassVar[int] = 413


def too_many(got: str, limit: int) -> PydanticCustomError:
    """Return the error of a field with too many items; to be raised by a validator."""
    return PydanticCustomError(_LASTING, "at most {limit}", {"limit": limit, "count": got})


def lasting(allowed: str) -> PydanticCustomError:
    """Return the error of a list that is invalid whatever items follow; to be raised by a validator."""
    return PydanticCustomError(_LASTING, "{allowed}", {"allowed": allowed})


def invalid_argument(error: ValidationError) -> InvalidArgumentError:
    """Return the first failure of a validation as an error that names the field."""
    return _failure(error.errors(include_url=False)[0], is_whole=True)


def invalid_beginning(error: ValidationError, open_path: Sequence[str | int]) -> InvalidArgumentError | None:
    """Return the first definite failure of a partly read document; None if the rest could make it valid.

    Args:
        error: The failures of the part that was read.
        open_path: Where reading stopped, see `orchestrator.api.http.json_text.Decoded`.
    """
    path = tuple(map(str, open_path))
    for failure in error.errors(include_url=False):
        if _stays_wrong(failure, path):
            return _failure(failure, is_whole=False)
    return None


def _stays_wrong(failure: ErrorDetails, open_path: tuple[str, ...]) -> bool:
    """Return whether a failure remains whatever follows in the open lists and objects."""
    if failure["type"] == _LASTING:
        return True
    path = tuple(map(str, failure["loc"]))
    if failure["type"] == "missing":
        path = path[:-1]
    return open_path[: len(path)] != path


def _failure(failure: ErrorDetails, *, is_whole: bool) -> InvalidArgumentError:
    field = ".".join(map(str, failure["loc"])) or "body"
    if failure["type"] == "missing":
        return InvalidArgumentError(field, "nothing", "a value; it is required")
    if (count := failure.get("ctx", {}).get("count")) is not None:
        return InvalidArgumentError(field, count if is_whole else f"at least {count}", failure["msg"])
    got = rendering(failure["input"])
    if failure["type"] == "extra_forbidden":
        return InvalidArgumentError(field, got, "no such field; it is unknown or not supported")
    return InvalidArgumentError(field, got, _allowed(failure["msg"]))


def _allowed(message: str) -> str:
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


def as_gammaray_error(error: BaseException) -> GammarayError:
    """Return `error` itself if it is a GammarayError, else log it and return an InternalError."""
    if isinstance(error, GammarayError):
        return error
    _logger.error("unexpected error in a request", exc_info=error)
    return InternalError(f"internal error ({type(error).__name__})")


def error_body(error: GammarayError) -> Error:
    """Return OpenAI's error object for an error."""
    message, param = str(error), None
    if isinstance(error, InvalidArgumentError):
        param = _HTTP_NAMES.get(error.field, error.field)
        message = f"{param}: got {error.got}, allowed: {error.allowed}"
    code = _CODES.get(error.http_status)
    if isinstance(error, ContextLengthError):
        # Clients recognise OpenAI's code, or the words of one of OpenAI's two messages.
        code = "context_length_exceeded"
        message = (
            f"This model's maximum context length is {error.max_context} tokens. "
            f"Input tokens exceed the configured limit of {error.max_context - 1} tokens. "
            f"Your {param} resulted in {error.size}. Please reduce the length of the {param}."
        )
    if isinstance(error, NotFoundError) and error.kind:
        code = f"{error.kind}_not_found"
    return _object(message, error.http_status, param, code)


def install_handlers(app: FastAPI) -> None:
    """Answer every error of `app` with an OpenAI error object."""

    async def gammaray_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(as_gammaray_error(error))

    async def http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = "unknown_url" if error.status_code == 404 else None
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of the path's first route alone
            here = [one for one in app.routes if one.matches(request.scope)[0] is not Match.NONE]
            methods = {name for one in here if isinstance(one, Route) for name in one.methods or ()}
            headers["Allow"] = ", ".join(sorted(methods))
        return JSONResponse(_object(message, error.status_code, None, code), error.status_code, headers)

    app.add_exception_handler(GammarayError, gammaray_error)
    app.add_exception_handler(HTTPException, http_error)


def error_response(error: GammarayError) -> JSONResponse:
    """Return the HTTP response for an error."""
    return JSONResponse(error_body(error), error.http_status, headers=_headers(error))


async def guarded(answer: Callable[[], Awaitable[Response]]) -> Response:
    """Convert any exception of `answer`, including bugs, into an OpenAI error object."""
    try:
        return await answer()
    except ClientDisconnect:
        return Response(status_code=CancelledError.http_status)  # the client has disconnected
    except Exception as error:
        return error_response(as_gammaray_error(error))


def _headers(error: GammarayError) -> Mapping[str, str] | None:
    if isinstance(error, ResourceExhaustedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, UnavailableError):
        return {"Retry-After": "1"}
    if isinstance(error, UnauthenticatedError):
        return {"WWW-Authenticate": "Bearer"}
    return None


def _object(message: str, status: int, param: str | None, code: str | None) -> Error:
    kind: ErrorType = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    # The message may quote lone surrogates, which UTF-8 cannot encode.
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
