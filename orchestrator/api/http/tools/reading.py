"""Reads the chunks of a completion for tool calls, also of one that is resumed."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from gammaray.types import Chunk, EmittedToken
from orchestrator.api.http.tools.calls import CallPlan, call_id
from orchestrator.api.http.tools.parser import CallEvent
from orchestrator.text.detokenizer import num_begun, num_chars


class CallReader:
    """Finds the tool calls in the chunks of one completion; `is_special` tells tokens that text omits."""

    def __init__(
        self, plan: CallPlan, is_special: Callable[[int], bool], stop: Sequence[str] = (), prompt: str = ""
    ) -> None:
        self._is_special, self._markers, self._stop = is_special, plan.markers, tuple(stop)
        self._seed = ""
        self._parser = plan.parser(lambda index: call_id(self._seed, index), prompt)
        self._hidden: list[tuple[int, str]] = []  # markers to come, with the characters before each
        self._num_chars = 0  # of the tokens so far
        self._num_read = 0  # of these, in text so far
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    @property
    def has_whole_calls(self) -> bool:
        return self._parser.is_whole

    def read(self, chunk: Chunk) -> list[CallEvent]:
        self._seed = f"{chunk.session_id}:{chunk.seed}"
        events = self._parser.push(self._with_markers(chunk.tokens, chunk.text))
        return events if chunk.finish_reason is None else events + self._parser.finish()

    def recall(self, tokens: Sequence[EmittedToken]) -> None:
        """Read tokens whose text the client of a resumed completion has already.

        As in the detokeniser, incomplete characters and what may become a stop string are not yet text.
        """
        shown = (token.token_bytes for token in tokens if not self._is_special(token.token_id))
        text = self._held + self._utf8.decode(b"".join(shown))
        keep = max((num_begun(text, stop) for stop in self._stop), default=0)
        text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self._parser.push(self._with_markers(tokens, text))

    def _with_markers(self, tokens: Sequence[EmittedToken], text: str) -> str:
        """Return a piece of text with the markers that it omits, as they are special tokens."""
        if not self._markers:
            return text
        for token in tokens:
            if not self._is_special(token.token_id):
                self._num_chars += num_chars(token.token_bytes)
            elif token.token_bytes in self._markers:
                self._hidden.append((self._num_chars, token.token_bytes.decode()))
        parts, start = [], self._num_read
        self._num_read += len(text)
        done = start
        while self._hidden and self._hidden[0][0] <= self._num_read:
            position, marker = self._hidden.pop(0)
            parts += [text[done - start : position - start], marker]
            done = max(done, position)
        return "".join([*parts, text[done - start :]])
