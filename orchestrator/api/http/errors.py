"""Errors as OpenAI's error object, with their HTTP statuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import grpc
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
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

_TYPES: dict[int, ErrorType] = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
# Beginnings of pydantic's names of failures, and what is allowed instead.
_KINDS = {
    **dict.fromkeys(("model_", "dict_"), "an object"),
    **{"list_": "a list", "string_t": "a string", "bool_": "true or false", "float_": "a number"},
    **{"int_": "an integer", "finite_": "a finite number"},
}
# Fields whose HTTP name differs from that of the request type.
_OPTIONS = "verification drafter gamma max_gamma max_nodes session_id turn cache_salt"
_HTTP_NAMES = {name: f"gammaray.{name}" for name in _OPTIONS.split()}
_HTTP_NAMES |= {"num_top_logprobs": "top_logprobs", "num_prompt_logprobs": "prompt_logprobs"}


class BodyTooLargeError(GammarayError):
    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status: ClassVar[int] = 413


def invalid_argument(failures: Sequence[Any], body: Any) -> InvalidArgumentError:
    """Return the first of pydantic's failures, of a body or URL, as an error that names the field."""
    failure = failures[0]
    field = ".".join(map(str, _path(failure["loc"], body))).removesuffix("[]") or "body"
    got, bounds = failure["input"], failure.get("ctx", {})
    if failure["type"] == "missing":
        return InvalidArgumentError(field, "nothing", "a value; it is required")
    if failure["type"] == "extra_forbidden":
        return InvalidArgumentError(field, rendering(got), "no such field; it is unknown or not supported")
    for name, bound in (("max_length", "at most"), ("min_length", "at least")):
        if name in bounds:
            unit = "characters" if isinstance(got, str) else "items"
            return InvalidArgumentError(field, f"{len(got)} {unit}", f"{bound} {bounds[name]}")
    if failure["type"] == "string_pattern_mismatch":
        return InvalidArgumentError(field, rendering(got), f"a string that matches {bounds['pattern']}")
    own = next((words for kind, words in _KINDS.items() if failure["type"].startswith(kind)), None)
    allowed = failure["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return InvalidArgumentError(field, rendering(got), own or allowed)


def _path(loc: Sequence[str | int], body: Any) -> Iterator[str | int]:
    """Yield the keys and indices of a place in a body, without the names of its pydantic types."""
    for number, part in enumerate(loc, start=1):
        is_index = isinstance(body, list) and isinstance(part, int) and part < len(body)
        if is_index or (isinstance(body, dict) and part in body):
            yield part
            body = body[part]
        elif isinstance(body, dict) and number == len(loc):  # a missing field
            yield part


def as_gammaray_error(error: BaseException) -> GammarayError:
    """Return `error` itself if it is a GammarayError, else log it and return an InternalError."""
    if isinstance(error, GammarayError):
        return error
    _logger.error("unexpected error in a request", exc_info=error)
    return InternalError(f"internal error ({type(error).__name__})")


def error_body(error: GammarayError) -> Error:
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


class GuardedRoute(APIRoute):
    """A route that answers every exception, bugs included, with an OpenAI error object. GET takes HEAD."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        if self.methods and "GET" in self.methods:
            self.methods.add("HEAD")

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except ClientDisconnect:
                return Response(status_code=CancelledError.http_status)
            except RequestValidationError as error:
                return error_response(invalid_argument(error.errors(), dict(request.query_params)))
            except Exception as error:
                return error_response(as_gammaray_error(error))

        return guarded


def install_handlers(app: FastAPI) -> None:
    """Answer requests for unknown paths and methods with an OpenAI error object."""

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

    app.add_exception_handler(HTTPException, http_error)


def error_response(error: GammarayError) -> JSONResponse:
    return JSONResponse(error_body(error), error.http_status, headers=_headers(error))


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
