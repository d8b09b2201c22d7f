"""A draft with another vocabulary than the target's: how its tokens become proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.gguf import is_gguf, read_header
from gammaray.types import VerificationMethod
from services.engine.core.model import load_config
from services.vocabulary.context import ContextTranslation
from services.vocabulary.intersection import Intersection
from services.vocabulary.spelling import Vocabulary, incomplete_tail, load_vocabulary

__all__ = ["MappingMethod", "Translation", "load_translation", "target_size"]

MappingMethod = Literal["auto", "tokens", "text"]
"""How draft tokens become target tokens: one by one, where both have a token with the same bytes ("tokens",
TLI), or by their text, which the target's tokenizer tokenises ("text", SLEM)."""

MAX_WINDOW = 8
"""Committed tokens before a continuation that are tokenised with it, at most: those of its first word."""


class Translation:
    """The vocabularies of a draft and its target.

    Args:
        draft: The draft's vocabulary.
        target: The target's.
        draft_size: Number of logits of the draft model.
        target_size: Number of token ids of the target model.
        method: How draft tokens become target tokens.

    Raises:
        InvalidArgumentError: No token of one is a token of the other.
    """

    def __init__(
        self,
        draft: Vocabulary,
        target: Vocabulary,
        draft_size: int,
        target_size: int,
        method: MappingMethod = "auto",
    ) -> None:
        self.draft, self.target = draft, target
        self.draft_size, self.target_size, self.method = draft_size, target_size, method
        self.common = Intersection(draft, target, draft_size, target_size)
        if not self.common.num_text_tokens:
            raise InvalidArgumentError(
                "target_tokenizer",
                "a tokenizer that shares no token with the draft's",
                "one that shares at least one token by its bytes",
            )

    def context(self, limit: int) -> ContextTranslation:
        """Return the translation of a new session's text, which stops after `limit` draft tokens."""
        return ContextTranslation(self.draft, self.target, self.common.to_draft, limit)

    def by_text(self, method: VerificationMethod, temperature: float) -> bool:
        """Return whether proposals are made by text for a session.

        Rejection verification above temperature 0 tests tokens by the distribution that they were drawn from,
        which a text does not have. Above temperature 0, coupled verification accepts a token if both models
        draw it with the same noise; text has no noise of the target's tokens. Naive verification shares none
        either, and its target draws the likeliest text more often than a draw of the draft's.
        """
        if temperature > 0 and method is VerificationMethod.REJECTION:
            return False
        is_shared = temperature > 0 and method is VerificationMethod.COUPLED
        return self.method == "text" or (self.method == "auto" and not is_shared)

    def continuation(self, committed: Sequence[int], added: bytes) -> list[int]:
        """Return the target's tokens for bytes that follow committed tokens.

        Args:
            committed: The last committed tokens.
            added: Bytes after them; an incomplete character at the end is left out.

        Returns:
            The tokens; more text may change those of the last word.
        """
        added = added[: len(added) - incomplete_tail(added)]
        window = self._window(committed)
        token_ids = self.target.encode(self.target.bytes_of(window) + added)
        if token_ids[: len(window)] == window:
            return token_ids[len(window) :]
        return self.target.encode(added)  # the committed tokens stay, whatever the tokenizer would make now

    def num_stable(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens of a continuation are before its last word: more text keeps them."""
        for index in range(len(token_ids) - 1, 0, -1):
            before = _kind(self.target.spellings[token_ids[index - 1]][-1:])
            # A space belongs to the word after it.
            if before not in ("space", _kind(self.target.spellings[token_ids[index]][:1])):
                return index
        return 0

    def _window(self, committed: Sequence[int]) -> list[int]:
        """Return the committed tokens of the last word."""
        spellings = self.target.spellings
        for count in range(1, min(len(committed), MAX_WINDOW) + 1):
            token_id = committed[-count]
            spelling = spellings[token_id] if token_id < len(spellings) else b""
            if not spelling:
                return list(committed[len(committed) - count + 1 :])
            if spelling[:1].isspace():
                return list(committed[-count:])
        return list(committed[-MAX_WINDOW:])


def _kind(byte: bytes) -> str:
    """Return the kind of a character, by which tokenizers split text into words, from one of its bytes."""
    if byte.isspace():
        return "space"
    if byte.isdigit():
        return "digit"
    return "letter" if byte.isalpha() or not byte.isascii() else "other"


def load_translation(draft: str, draft_size: int, target: str, method: MappingMethod) -> Translation:
    """Load the tokenizers of a pair.

    Args:
        draft: Directory, hub name or GGUF file of the draft.
        draft_size: Number of logits of the draft model.
        target: Directory, hub name or GGUF file of the target; a directory may have its tokenizer only.
        method: How draft tokens become target tokens.

    Raises:
        InvalidArgumentError: A tokenizer does not load or cannot be used, or they share no token.
    """
    target_vocabulary = load_vocabulary(target, "target_tokenizer")
    draft_vocabulary = load_vocabulary(draft, "model")
    size = target_size(target) or len(target_vocabulary)
    return Translation(draft_vocabulary, target_vocabulary, draft_size, size, method)


def target_size(path: str) -> int:
    """Return the number of token ids of a model; 0 if there is only a tokenizer, or nothing."""
    try:
        if is_gguf(path):
            return read_header(path).vocab_size
        config = load_config(path)
    except GammarayError:
        return 0
    return int(getattr(config.get_text_config(), "vocab_size", None) or 0)
