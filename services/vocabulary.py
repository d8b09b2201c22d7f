"""The fingerprint of a model's tokenizer, see `gammaray.vocabulary`."""

from __future__ import annotations

import logging

from transformers import AutoTokenizer

from gammaray.vocabulary import vocabulary_sha256

__all__ = ["vocab_sha256"]

_log = logging.getLogger(__name__)


def vocab_sha256(model: str) -> str:
    """Return the fingerprint of a model's vocabulary; empty without a tokenizer.

    Args:
        model: Directory or hub name.
    """
    try:
        vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    except Exception as error:
        # A model without a tokenizer is served all the same; transformers has no one error for it.
        _log.info("no tokenizer in %s: %s", model, error)
        return ""
    return vocabulary_sha256(vocabulary)
