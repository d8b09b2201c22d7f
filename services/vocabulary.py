"""A fingerprint of a tokenizer's vocabulary, by which draft and target are matched."""

from __future__ import annotations

import hashlib
import logging

from transformers import AutoTokenizer

__all__ = ["vocab_sha256"]

_log = logging.getLogger(__name__)


def vocab_sha256(model: str) -> str:
    """Return the SHA-256 of the vocabulary's `id token` lines in order of id; empty without a tokenizer.

    Args:
        model: Directory or hub name.
    """
    try:
        vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    except Exception as error:
        # A model without a tokenizer is served all the same; transformers has no one error for it.
        _log.info("no tokenizer in %s: %s", model, error)
        return ""
    lines = (f"{token_id} {token}\n" for token, token_id in sorted(vocabulary.items(), key=lambda x: x[1]))
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
