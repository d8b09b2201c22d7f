"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gammaray.types import EmittedToken

__all__ = ["ChatLogprobs", "CompletionLogprobs", "LogprobFormat"]

_LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class LogprobFormat(Protocol):
    """Renders the log-probabilities of a choice's tokens, piece by piece."""

    def render(self, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        """Return the JSON object for the next tokens."""
        ...


class CompletionLogprobs:
    """The form of /v1/completions: parallel lists, and offsets into the text.

    `text_offset` counts the characters that the tokens before this one completed.
    """

    def __init__(self) -> None:
        self._num_chars = 0

    def render(self, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        """Return the JSON object for the next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._num_chars)
            # Each character of UTF-8 has one byte that is no continuation byte.
            self._num_chars += sum(byte & 0xC0 != 0x80 for byte in token.token_bytes)
        return {
            "tokens": [_text(token.token_bytes) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": offsets,
        }


class ChatLogprobs:
    """The form of /v1/chat/completions: one object per token."""

    def render(self, tokens: Sequence[EmittedToken]) -> dict[str, Any]:
        """Return the JSON object for the next tokens."""
        content = [
            {
                **_entry(token.token_bytes, token.logprob),
                "top_logprobs": [_entry(top.token_bytes, top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def _entry(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _top(token: EmittedToken) -> dict[str, float]:
    """Return the most likely tokens and, as OpenAI does, the emitted one."""
    top = {_text(top.token_bytes): _finite(top.logprob) for top in token.top_logprobs}
    return {**top, _text(token.token_bytes): _finite(token.logprob)}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(logprob, _LOWEST)


def _text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character, written as OpenAI does
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
