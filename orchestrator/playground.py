"""The page at /: one file, which asks nobody else for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

import fastapi
from fastapi.responses import HTMLResponse

__all__ = ["playground"]

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def playground() -> fastapi.Response:
    """Return the page; browsers let it run its own script alone and talk to this server alone."""
    page = _page()
    return HTMLResponse(
        page,
        headers={
            "Cache-Control": "no-cache",
            "Content-Security-Policy": _policy(page),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        },
    )


@cache
def _page() -> str:
    return files("orchestrator").joinpath("playground.html").read_text(encoding="utf-8")


@cache
def _policy(page: str) -> str:
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, body in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        f"img-src data:; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}"
    )
