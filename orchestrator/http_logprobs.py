"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gammaray.types import EmittedToken, PromptLogprobs

__all__ = ["ChatLogprobs", "CompletionLogprobs", "EchoedPrompt", "LogprobFormat", "prompt_entries"]

_LOWEST = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""


class LogprobFormat(Protocol):
    """Renders the log-probabilities of a choice's tokens, piece by piece."""

    def render(self, tokens: Sequence[EmittedToken], prompt: EchoedPrompt | None = None) -> dict[str, Any]:
        """Return the JSON object for the next tokens, after those of a prompt that is echoed."""
        ...


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt to be told of among a completion's tokens.

    Args:
        logprobs: Its log-probabilities.
        num_top: Alternatives to tell of each token.
        spell: Returns the bytes of a token.
        is_special: Tells whether a token is one that decoded text leaves out.
    """

    logprobs: PromptLogprobs
    num_top: int
    spell: Callable[[int], bytes]
    is_special: Callable[[int], bool]


class CompletionLogprobs:
    """The form of /v1/completions: parallel lists, and offsets into the text.

    `text_offset` counts the characters that the tokens before this one completed.

    Args:
        echo: The text before the completion, in which the offsets of a prompt's tokens count.
    """

    def __init__(self, echo: str = "") -> None:
        self._echo = echo
        self._num_chars = len(echo)

    def render(self, tokens: Sequence[EmittedToken], prompt: EchoedPrompt | None = None) -> dict[str, Any]:
        """Return the JSON object for the next tokens; of a prompt's first token nothing is known."""
        spelled: list[bytes] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        if prompt is not None:
            told, spell = prompt.logprobs, prompt.spell
            spelled += map(spell, told.token_ids)
            logprobs += [None, *map(_finite, told.logprobs)]
            top.append(None)
            for entry, logprob in enumerate(told.logprobs):
                others = {_text(spell(i)): _finite(p) for i, p in told.top(entry, prompt.num_top)}
                top.append({**others, _text(spelled[entry + 1]): _finite(logprob)})
        offsets = [] if prompt is None else self._echoed_offsets(prompt)
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += _num_chars(token.token_bytes)
        spelled += [token.token_bytes for token in tokens]
        return {
            "tokens": [*map(_text, spelled)],
            "token_logprobs": [*logprobs, *(_finite(token.logprob) for token in tokens)],
            "top_logprobs": [*top, *map(_top, tokens)],
            "text_offset": offsets,
        }

    def _echoed_offsets(self, prompt: EchoedPrompt) -> list[int]:
        offsets, offset = [], 0
        for token_id in prompt.logprobs.token_ids:
            offsets.append(offset)
            token_bytes = prompt.spell(token_id)
            # A text given by the client may spell special tokens; decoded ids never do.
            is_shown = not prompt.is_special(token_id) or self._echo.startswith(_text(token_bytes), offset)
            if is_shown:
                offset = min(offset + _num_chars(token_bytes), len(self._echo))
        return offsets


class ChatLogprobs:
    """The form of /v1/chat/completions: one object per token."""

    def render(self, tokens: Sequence[EmittedToken], prompt: EchoedPrompt | None = None) -> dict[str, Any]:
        """Return the JSON object for the next tokens; prompts of chats are never echoed."""
        content = [
            {
                **_entry(token.token_bytes, token.logprob),
                "top_logprobs": [_entry(top.token_bytes, top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def prompt_entries(
    prompt: PromptLogprobs, num_top: int, spell: Callable[[int], bytes]
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: by token id the prompt's own token and the most likely ones.

    The first entry is null, as nothing precedes the first token.
    """
    entries: list[dict[str, Any] | None] = [None]
    for entry, (token_id, logprob) in enumerate(zip(prompt.token_ids[1:], prompt.logprobs, strict=True)):
        top = enumerate(prompt.top(entry, num_top), start=1)
        ranked = {other: (value, rank) for rank, (other, value) in top}
        ranked.setdefault(token_id, (logprob, prompt.ranks[entry]))
        entries.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": spell(other).decode("utf-8", "replace"),
                }
                for other, (value, rank) in ranked.items()
            }
        )
    return entries


def _entry(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _top(token: EmittedToken) -> dict[str, float]:
    """Return the most likely tokens and, as OpenAI does, the emitted one."""
    top = {_text(top.token_bytes): _finite(top.logprob) for top in token.top_logprobs}
    return {**top, _text(token.token_bytes): _finite(token.logprob)}


def _num_chars(token_bytes: bytes) -> int:
    # Each character of UTF-8 has one byte that is no continuation byte.
    return sum(byte & 0xC0 != 0x80 for byte in token_bytes)


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(logprob, _LOWEST)


def _text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character, written as OpenAI does
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
