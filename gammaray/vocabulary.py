"""Fingerprint of a tokenizer's vocabulary, used to match orchestrators, targets and drafters."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

__all__ = ["vocabulary_sha256"]


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256 of the `id token` lines in order of id, in hexadecimal.

    Args:
        vocabulary: Id of each token, added tokens included.
    """
    entries = sorted(vocabulary.items(), key=lambda entry: entry[1])
    lines = "".join(f"{token_id} {token}\n" for token, token_id in entries)
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()
