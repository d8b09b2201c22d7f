"""A draft with another vocabulary than the target's: how its tokens become proposals."""

from __future__ import annotations

from typing import Literal

from transformers import AutoTokenizer

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.gguf import check_packages, is_gguf, pretrained_arguments, read_header
from gammaray.types import VerificationMethod
from gammaray.vocabulary import Vocabulary
from services.engine.core.model import load_config
from services.vocabulary.context import ContextTranslation
from services.vocabulary.intersection import Intersection

__all__ = ["MappingMethod", "Translation", "load_translation", "load_vocabulary", "target_size"]

MappingMethod = Literal["auto", "tokens", "text"]
"""How draft tokens become target tokens: one by one, where both have a token with the same bytes ("tokens",
TLI), or by their text, which the target's tokenizer tokenises ("text", SLEM)."""


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
                "target_model",
                "a tokenizer that shares no token with the draft's",
                "one that shares at least one token by its bytes",
            )

    def context(self, limit: int) -> ContextTranslation:
        """Return the translation of a new session's text, which stops after `limit` draft tokens."""
        return ContextTranslation(self.draft, self.target, self.common.to_draft, limit)

    def by_text(self, method: VerificationMethod, temperature: float) -> bool:
        """Return whether proposals are made by text for a session.

        Rejection and block verification above temperature 0 test tokens by the distribution that they were
        drawn from, which a text does not have. Above temperature 0, coupled verification accepts a token if
        both models draw it with the same noise; text has no noise of the target's tokens. Naive verification
        shares none either, and its target draws the likeliest text more often than a draw of the draft's.
        """
        if temperature > 0 and method.uses_draft_distributions:
            return False
        is_shared = temperature > 0 and method is VerificationMethod.COUPLED
        return self.method == "text" or (self.method == "auto" and not is_shared)


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
    target_vocabulary = load_vocabulary(target, "target_model")
    draft_vocabulary = load_vocabulary(draft, "model")
    size = target_size(target) or len(target_vocabulary)
    return Translation(draft_vocabulary, target_vocabulary, draft_size, size, method)


def load_vocabulary(model: str, field: str) -> Vocabulary:
    """Load the vocabulary of a model's tokenizer.

    Args:
        model: Directory, hub name or GGUF file.
        field: Name of the setting, for errors.

    Raises:
        InvalidArgumentError: The tokenizer does not load, or the bytes of its tokens are not known.
    """
    if is_gguf(model):
        read_header(model, field)
        check_packages(model, field)
    try:
        with pretrained_arguments(model) as (source, arguments):
            return Vocabulary(AutoTokenizer.from_pretrained(source, **arguments))
    except Exception as error:  # transformers and tokenizers raise different errors for broken files
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        allowed = "a directory, hub name or GGUF file with a byte-level or SentencePiece tokenizer"
        raise InvalidArgumentError(field, f"{model!r} ({reason})", allowed) from error


def target_size(path: str) -> int:
    """Return the number of token ids of a model; 0 if there is only a tokenizer, or nothing."""
    try:
        if is_gguf(path):
            return read_header(path).vocab_size
        config = load_config(path)
    except GammarayError:
        return 0
    return int(getattr(config.get_text_config(), "vocab_size", None) or 0)
