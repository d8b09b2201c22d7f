"""`openai:URL`: a server with OpenAI's API that drafts, in place of a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from gammaray.demo_pair import early_exit_layers
from gammaray.errors import InvalidArgumentError

__all__ = ["DraftServerUrl", "check_draft", "check_draft_server", "is_draft_server"]

SCHEME = "openai:"

_ALLOWED = f"{SCHEME}http://HOST:PORT or {SCHEME}https://HOST, with #MODEL for one of several models"


@dataclass(frozen=True)
class DraftServerUrl:
    """URL of a server that drafts.

    Args:
        root: Its URL without a trailing `/v1`, under which servers have further APIs of their own.
        model: Name of the model; "" for the first one that the server lists.
    """

    root: str
    model: str = ""

    @property
    def address(self) -> str:
        """Host, port and path, as status and traces show it."""
        return self.root.partition("://")[2]

    @classmethod
    def parse(cls, text: str, field: str = "draft_server") -> DraftServerUrl:
        """Parse `openai:URL`, whose URL may end with `/v1`, and with `#MODEL`.

        Raises:
            InvalidArgumentError: It is not such a URL, or it has a user or password, which the message does
                not contain.
        """
        url, _, model = text.removeprefix(SCHEME).partition("#")
        try:
            parts = urlsplit(url)
            is_valid = parts.port != 0 and bool(parts.hostname)
        except ValueError:
            is_valid = False
        if "@" in url:
            allowed = "a URL without; draft_key_file names a file with the key"
            raise InvalidArgumentError(field, "a URL with a user or password", allowed)
        is_printable = url.isascii() and url.isprintable() and not set(" \\\"'<>") & set(url)
        if not (is_valid and is_printable and text.startswith(SCHEME)):
            raise InvalidArgumentError(field, text, _ALLOWED)
        if parts.scheme not in ("http", "https") or parts.query:
            raise InvalidArgumentError(field, text, _ALLOWED)
        return cls(url.rstrip("/").removesuffix("/v1").rstrip("/"), model)


def is_draft_server(draft: str) -> bool:
    """Whether a `draft` setting names a server instead of a model."""
    return draft.startswith(SCHEME)


def check_draft(draft: str) -> str:
    """Check a `draft` setting as far as it names a server or an early exit, and return it.

    Raises:
        InvalidArgumentError: See `DraftServerUrl.parse` and `early_exit_layers`; or it is a URL without
            `openai:`.
    """
    early_exit_layers(draft)
    if is_draft_server(draft):
        DraftServerUrl.parse(draft, "draft")
    elif draft.startswith(("http://", "https://")):
        raise InvalidArgumentError("draft", "a URL", _ALLOWED)
    return draft


def check_draft_server(url: str) -> str:
    """Check a `draft_server` setting, which is `openai:URL` or empty, and return it.

    Raises:
        InvalidArgumentError: See `DraftServerUrl.parse`.
    """
    if url:
        DraftServerUrl.parse(url)
    return url
