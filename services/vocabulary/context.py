"""The draft's tokens for the committed tokens of the target, kept up to date between cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gammaray.vocabulary import Vocabulary

MIN_SEGMENT, MAX_SEGMENT = 64, 256
"""Bytes after which a segment ends at the next word, or at the next token."""


class ContextTranslation:
    """Translates a growing text: the bytes of the target's tokens, tokenised by the draft's tokenizer.

    The text is cut into segments, each tokenised on its own. Where a segment ends depends on the tokens
    before and at its end only, so a new token changes the draft's tokens of the last segment at most, and the
    translation is a function of the target's tokens alone: it does not depend on how they arrived.

    Special tokens of the target become those of the draft with the same content, `specials`, its end of
    sequence becomes the draft's; others are left out, as are bytes that no token of the draft has. The
    translation stops after `limit` draft tokens.
    """

    def __init__(
        self, draft: Vocabulary, target: Vocabulary, specials: Mapping[int, int], limit: int
    ) -> None:
        self._draft, self._target, self._specials, self._limit = draft, target, specials, limit
        self.tokens: list[int] = list(draft.prefix)
        self._segments = [(0, len(self.tokens))]
        self._num_read = 0

    def follow(self, token_ids: Sequence[int], changed_from: int) -> int:
        """Translate the target's tokens; those before `changed_from` are as in the last call.

        Returns the number of leading draft tokens that are certainly unchanged.
        """
        segments, changed_from = self._segments, min(changed_from, self._num_read)
        while len(segments) > 1 and segments[-1][0] >= changed_from:
            segments.pop()
        start, num_unchanged = segments[-1]
        del self.tokens[num_unchanged:]
        self._translate(token_ids, start)
        self._num_read = len(token_ids)
        return num_unchanged

    def _translate(self, token_ids: Sequence[int], start: int) -> None:
        spellings, text = self._target.spellings, b""
        for index in range(start, len(token_ids)):
            token_id = token_ids[index]
            spelling = spellings[token_id] if token_id < len(spellings) else b""
            if not spelling:
                self.tokens += self._draft.encode(text)
                special = self._specials.get(token_id)
                self.tokens += [] if special is None else [special]
                self._segments.append((index + 1, len(self.tokens)))
                text = b""
            elif _ends_before(text, spelling):
                self.tokens += self._draft.encode(text)
                self._segments.append((index, len(self.tokens)))
                text = spelling
            else:
                text += spelling
            if len(self.tokens) > self._limit:
                return
        self.tokens += self._draft.encode(text)


def _ends_before(text: bytes, spelling: bytes) -> bool:
    if len(text) >= MAX_SEGMENT:
        return True
    return len(text) >= MIN_SEGMENT and spelling[:1].isspace() and not text[-1:].isspace()
