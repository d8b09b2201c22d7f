"""A draft with another vocabulary than the target's: how its tokens become proposals."""

from __future__ import annotations

from transformers import AutoTokenizer

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.vocabulary import Vocabulary
from services.engine.core.model import load_config
from services.vocabulary.context import ContextTranslation
from services.vocabulary.intersection import Intersection


class Translation:
    """The vocabularies of a draft and its target, which share a token."""

    def __init__(self, draft: Vocabulary, target: Vocabulary, draft_size: int, target_size: int) -> None:
        self.draft, self.target = draft, target
        self.target_size = target_size
        self.common = Intersection(draft, target, draft_size, target_size)
        if not self.common.num_text_tokens:
            raise InvalidArgumentError(
                "target",
                "a tokenizer that shares no token with the draft's",
                "one that shares at least one token by its bytes",
            )

    def context(self, limit: int) -> ContextTranslation:
        """Return the translation of a new session's text, which stops after `limit` draft tokens."""
        return ContextTranslation(self.draft, self.target, self.common.to_draft, limit)


def load_translation(draft: str, draft_size: int, target: str) -> Translation:
    """Load the tokenizers of a pair, whose draft model has `draft_size` logits.

    A directory of a target may have its tokenizer only.
    """
    vocabulary = load_vocabulary(target, "target")
    size = target_size(target) or len(vocabulary)
    return Translation(load_vocabulary(draft, "model"), vocabulary, draft_size, size)


def load_vocabulary(model: str, field: str) -> Vocabulary:
    """Load the vocabulary of a model's tokenizer; the bytes of its tokens have to be known."""
    try:
        return Vocabulary(AutoTokenizer.from_pretrained(model))
    except Exception as error:  # transformers and tokenizers raise different errors for broken files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        allowed = "a directory or hub name with a byte-level or SentencePiece tokenizer"
        raise InvalidArgumentError(field, f"{model!r} ({reason})", allowed) from error


def target_size(path: str) -> int:
    """Return the number of token ids of a model; 0 if there is only a tokenizer, or nothing."""
    try:
        config = load_config(path)
    except GammarayError:
        return 0
    return int(getattr(config.get_text_config(), "vocab_size", None) or 0)
