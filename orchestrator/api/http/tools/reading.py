"""Reads the chunks of a completion for tool calls, also of one that is resumed."""

from __future__ import annotations

from collections.abc import Sequence

from gammaray.types import Chunk, EmittedToken
from orchestrator.api.http.tools.calls import CallPlan, call_id
from orchestrator.api.http.tools.parser import CallEvent
from orchestrator.text.detokenizer import Detokenizer, num_chars
from orchestrator.text.tokenizer import Tokenizer


class CallReader:
    """Finds the tool calls in the chunks of one completion."""

    def __init__(
        self, plan: CallPlan, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt: str = ""
    ) -> None:
        self._tokenizer, self._markers = tokenizer, plan.markers
        self._seed = ""
        self._parser = plan.parser(lambda index: call_id(self._seed, index), prompt)
        self._hidden: list[tuple[int, str]] = []  # markers to come, with the characters before each
        self._num_chars = 0  # of the tokens so far
        self._num_read = 0  # of these, in text so far
        self._recalled = Detokenizer(tokenizer, (), stop)

    @property
    def has_whole_calls(self) -> bool:
        return self._parser.is_whole

    def read(self, chunk: Chunk) -> list[CallEvent]:
        self._seed = f"{chunk.session_id}:{chunk.seed}"
        events = self._parser.push(self._with_markers(chunk.tokens, chunk.text))
        return events if chunk.finish_reason is None else events + self._parser.finish()

    def recall(self, tokens: Sequence[EmittedToken]) -> None:
        """Read tokens whose text the client of a resumed completion has already."""
        for token in tokens:
            self._recalled.push(token.token_id)
        self._parser.push(self._with_markers(tokens, self._recalled.take(final=False)))

    def _with_markers(self, tokens: Sequence[EmittedToken], text: str) -> str:
        """Return a piece of text with the markers that it omits, as they are special tokens."""
        if not self._markers:
            return text
        for token in tokens:
            if not self._tokenizer.is_special(token.token_id):
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
