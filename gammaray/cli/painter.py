"""Which origin each character of a streamed completion has.

The text of a chunk and the tokens it carries do not line up: characters are held back while they are
incomplete or could start a stop string, and tokens beyond a stop string have no text at all. So the tokens'
bytes are decoded here as they come, each character tagged with the token that completed it, and the chunks'
text, which is what is shown, takes its tags from there.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from itertools import groupby

from gammaray.types import Chunk, TokenOrigin

__all__ = ["OriginPainter"]


class OriginPainter:
    """Splits the text of one completion's chunks into runs of one origin."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""
        self._origins: list[TokenOrigin] = []
        self._last = TokenOrigin.BONUS

    def runs(self, chunk: Chunk) -> Iterator[tuple[str, TokenOrigin]]:
        """Yield the chunk's text, all of it and nothing else, as (characters, origin)."""
        for token in chunk.tokens:
            self._push(self._decoder.decode(token.token_bytes), token.origin)
        if chunk.finish_reason is not None:
            self._push(self._decoder.decode(b"", final=True), self._last)
        tagged = zip(chunk.text, self._take(chunk.text), strict=True)
        for origin, run in groupby(tagged, key=lambda pair: pair[1]):
            yield "".join(character for character, _ in run), origin

    def _push(self, text: str, origin: TokenOrigin) -> None:
        self._text += text
        self._origins += [origin] * len(text)
        self._last = origin

    def _take(self, text: str) -> list[TokenOrigin]:
        # Special tokens have bytes but no text: skip what stands before. Text that the bytes do not spell at
        # all (a tokenizer that changes what it joins) takes the tags in order.
        start = max(0, self._text.find(text))
        end = start + len(text)
        taken = self._origins[start:end]
        self._text, self._origins = self._text[end:], self._origins[end:]
        return taken + [self._last] * (len(text) - len(taken))
