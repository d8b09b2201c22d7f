"""Incremental detokenisation: emits complete characters only, and ends the text before a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from orchestrator.text.tokenizer import Tokenizer

PROMPT_WINDOW = 8
"""Trailing tokens of the prompt that may change the text of the first emitted token."""

MAX_TOKENS_PER_CHARACTER = 4
"""UTF-8 has at most four bytes per character; a longer sequence cannot become a character."""


class Detokenizer:
    """The text of one completion, whose first token may depend on the prompt's ids.

    Text that may be the start of a stop string is held back, as are the bytes of an incomplete character.
    Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder: _ByteDecoder | _WindowDecoder = (
            _ByteDecoder(tokenizer) if tokenizer.has_exact_bytes else _WindowDecoder(tokenizer, prompt)
        )
        self._stop = tuple(stop)
        self._held = ""
        self._ready = ""
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Add the next token; return True if it completes a stop string, which ends the text before it."""
        if self._tokenizer.is_special(token_id):
            return False
        self._held += self._decoder.push(token_id)
        if not self._stop:
            self._ready, self._held = self._ready + self._held, ""
            return False
        return self._release()

    def take(self, *, final: bool) -> str:
        """Return the text completed since the last call; with `final`, also any held text."""
        if final and not self._stopped:
            self._held += self._decoder.finish()
            if not self._release():
                self._ready, self._held = self._ready + self._held, ""
        text, self._ready = self._ready, ""
        return text

    def _release(self) -> bool:
        """Move text from held to ready, up to a stop string or a possible start of one."""
        starts = [start for start in (self._held.find(stop) for stop in self._stop) if start >= 0]
        if starts:
            self._stopped = True
            self._ready, self._held = self._ready + self._held[: min(starts)], ""
            return True
        cut = len(self._held) - max((num_begun(self._held, stop) for stop in self._stop), default=0)
        self._ready, self._held = self._ready + self._held[:cut], self._held[cut:]
        return False


def num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of a text with which a marker begins."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def num_chars(data: bytes) -> int:
    """Return the number of characters that begin in UTF-8 bytes: those that do not continue another one."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class _ByteDecoder:
    """Decoder for tokenizers whose text is the concatenation of their tokens' bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for all other tokenizers: a token's text is what it adds to the text of the preceding tokens.

    `tokenizers.decoders.DecodeStream` does the same, but for fast tokenizers only, and it raises if a later
    token changes earlier text; here such a change is dropped and the stream continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._read = [t for t in prompt[-PROMPT_WINDOW:] if not tokenizer.is_special(t)]
        self._unread: list[int] = []

    def push(self, token_id: int) -> str:
        self._unread.append(token_id)
        new = self._new_text()
        if new.endswith("\ufffd") and len(self._unread) < MAX_TOKENS_PER_CHARACTER:
            return ""  # an incomplete character: wait for the rest
        self._read, self._unread = self._unread, []
        return new

    def finish(self) -> str:
        return self._new_text() if self._unread else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._read)
        return self._tokenizer.decode(self._read + self._unread)[len(before) :]
