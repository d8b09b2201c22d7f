"""Protects a server without API keys from requests that pages of other sites send from a user's browser.

A browser sends a page's requests to any address that its user can reach, including loopback addresses. Two
headers, which pages cannot change, identify such requests: `Host` is the name in the URL (after DNS rebinding
of a page's name to this server's address, it is the page's name), and `Origin` is the site of the page.

With API keys neither is checked: a page would need a key, which browsers do not add by themselves.
Applications in browsers, whose origins are named in the settings, get CORS headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar
from urllib.parse import urlsplit

import grpc
from starlette.datastructures import Headers

from gammaray.checks import is_address
from gammaray.errors import InvalidArgumentError

_HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:/@\s]+)(:[0-9]{0,5})?", re.IGNORECASE)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_HINT = "GAMMARAY_ALLOWED_HOSTS adds names, GAMMARAY_CORS_ORIGINS origins of browser applications"


class ForeignSiteError(InvalidArgumentError):
    """A request that a page of another site may have sent."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.PERMISSION_DENIED
    http_status: ClassVar[int] = 403


def listed(text: str) -> list[str]:
    """Return names separated by commas, in lower case."""
    return [name.strip().lower() for name in text.split(",") if name.strip()]


class Hosts:
    """The host names under which a server may be called, with the further ones of `allowed`, by commas.

    Loopback names and IP addresses are always allowed: an address cannot be rebound. ".example.com" is that
    name and its subdomains, "*" any. `origins` are other sites whose pages may call the server.
    """

    def __init__(self, allowed: str = "", origins: Sequence[str] = ()) -> None:
        self._names, self._origins = listed(allowed), origins

    def check(self, headers: Headers) -> None:
        """Check `Host` and `Origin` of a request, which a page of another site may have sent."""
        if "*" in self._names:
            return
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._serves(host):
            allowed = ", ".join(["localhost", "an IP address", *self._names])
            raise ForeignSiteError("Host", host, f"{allowed} ({_HINT})")
        if origin is not None and origin not in self._origins and not self._is_own(origin, host or ""):
            raise ForeignSiteError("Origin", origin, f"none, or that of {host or 'this server'} ({_HINT})")

    def _serves(self, host: str) -> bool:
        if (name := _name_of(host)) is None:
            return False
        is_local = name == "localhost" or name.endswith(".localhost") or is_address(name)
        return is_local or self._is_named(name)

    def _is_own(self, origin: str, host: str) -> bool:
        try:
            scheme, place, *_ = urlsplit(origin)
        except ValueError:
            return False
        port = _DEFAULT_PORTS.get(scheme, "")  # browsers omit it, some proxies add it
        if place and place.lower().removesuffix(port) == host.lower().removesuffix(port):
            return True
        name = _name_of(place)  # a proxy may have replaced the Host header
        return name is not None and self._is_named(name)

    def _is_named(self, name: str) -> bool:
        return any(
            name == known.removeprefix(".") or (known.startswith(".") and name.endswith(known))
            for known in self._names
        )


def _name_of(host: str) -> str | None:
    """Return the name in `name:port`, in lower case; None if `host` has another form."""
    found = _HOST.fullmatch(host)
    return found["name"].lower().removesuffix(".") if found else None
