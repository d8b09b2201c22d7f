"""Vocabularies of tokenizers: their fingerprint, and the bytes that each token stands for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["decoder_kind", "is_byte_token", "spell", "vocabulary_sha256"]

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256 of the `id token` lines in order of id, in hexadecimal.

    Orchestrators, targets and drafters are matched by it.

    Args:
        vocabulary: Id of each token, added tokens included.
    """
    entries = sorted(vocabulary.items(), key=lambda entry: entry[1])
    lines = "".join(f"{token_id} {token}\n" for token, token_id in entries)
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def decoder_kind(tokenizer: Any) -> str:
    """Return how a tokenizer of `transformers` spells tokens: "byte_level", "byte_fallback" or "other".

    With the first two, text is the concatenation of the tokens' bytes, which `spell` returns.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    kinds = {step["type"] for step in _steps(decoder)}
    if kinds == {"ByteLevel"}:
        return "byte_level"
    # Llama 2, Gemma, Phi 3: "▁" is a space, <0x..> is a byte; Strip only drops a leading space of the
    # whole text, which a completion of a prompt must keep.
    if "ByteFallback" in kinds and kinds <= {"ByteFallback", "Replace", "Fuse", "Strip", "Metaspace"}:
        return "byte_fallback"
    return "other"


def spell(token: str, kind: str) -> bytes | None:
    """Return the bytes of a token that is not an added one; None if they are not known.

    Args:
        token: The token as the tokenizer stores it.
        kind: The tokenizer's `decoder_kind`.
    """
    if kind == "byte_level" and all(c in _BYTE_OF for c in token):
        return bytes(_BYTE_OF[c] for c in token)
    if kind == "byte_fallback":
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()
    return None


def is_byte_token(token: str) -> bool:
    """Return whether a token of a "byte_fallback" tokenizer stands for one byte, as <0x0A> does."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _steps(decoder: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's byte-level alphabet.

    Printable Latin-1 characters map to themselves; the other bytes, in order, to the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
