"""HTTP authentication: if keys are required, every path except the public ones needs a key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gammaray.errors import GammarayError
from orchestrator.access.caller import Authenticator, Caller
from orchestrator.api.http.errors import error_response
from orchestrator.api.http.sites import ForeignSiteError, Hosts

DOCUMENT_PATH = "/openapi.json"
RECEIPT_KEYS_PATH = "/v1/receipts/key"

PUBLIC_PATHS = frozenset({"/", "/favicon.ico", "/health", DOCUMENT_PATH, RECEIPT_KEYS_PATH})
"""They show that the server runs, its health, the API of this version, and the public keys with which anyone
checks receipts. The page at / prompts for a key itself."""


class AccessControl:
    """ASGI middleware: authenticates the caller, and rejects unknown callers before their body is read.

    Where no key is required, it rejects requests from pages of other sites, for which `hosts` are checked.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, hosts: Hosts) -> None:
        self._app, self._authenticator, self._hosts = app, authenticator, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, caller = Headers(scope=scope), None
            try:
                if self._authenticator.is_open:
                    self._hosts.check(headers)
                caller = self._authenticator.identify(headers)
            except GammarayError as error:
                if scope["path"] not in PUBLIC_PATHS or isinstance(error, ForeignSiteError):
                    await error_response(error)(scope, receive, send)
                    return
            scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)


def caller_of(request: Request) -> Caller:
    """Return the caller of a request that passed `AccessControl`."""
    caller = request.state.caller
    assert isinstance(caller, Caller)
    return caller
