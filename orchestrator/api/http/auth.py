"""Who calls over HTTP: every path needs a key, where keys are asked for, but those that are named here."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gammaray.errors import GammarayError
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.api.http import openapi
from orchestrator.api.http.errors import error_response

__all__ = ["AccessControl", "caller_of"]

PUBLIC_PATHS = frozenset({"/", "/favicon.ico", "/health", openapi.PATH})
"""They tell that the server is there, whether it is well, and what any server of this version takes. The page
at / asks for a key by itself."""


class AccessControl:
    """ASGI middleware: finds out who calls, and turns strangers away before anything of theirs is read.

    Args:
        app: What is protected.
        authenticator: Knows the keys.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app, self._authenticator = app, authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            headers = Headers(scope=scope)
            try:
                caller = self._authenticator.identify(headers)
            except GammarayError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return who sent a request that has come through `AccessControl`."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller
