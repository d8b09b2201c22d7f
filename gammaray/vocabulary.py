"""Vocabularies of tokenizers: their fingerprint, the bytes of each token, and tokens for any bytes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def vocabulary_sha256(vocabulary: Mapping[str, int]) -> str:
    """Return the hexadecimal SHA-256 of the `id token` lines in order of id, added tokens included."""
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
    """Return the bytes of a stored token, not an added one, by its `decoder_kind`; None if unknown."""
    if kind == "byte_level" and all(c in BYTE_OF for c in token):
        return bytes(BYTE_OF[c] for c in token)
    if kind == "byte_fallback":
        if is_byte_token(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()
    return None


def is_byte_token(token: str) -> bool:
    """Return whether a token of a "byte_fallback" tokenizer stands for one byte, as <0x0A> does."""
    return _BYTE_TOKEN.fullmatch(token) is not None


class Vocabulary:
    """The tokens of a fast tokenizer of `transformers`; ValueError if their bytes are not known."""

    def __init__(self, tokenizer: Any) -> None:
        kind = decoder_kind(tokenizer)
        if kind == "other":
            raise ValueError("its tokens are neither byte-level nor SentencePiece with byte fallback")
        ids: dict[str, int] = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        self.spellings = [b""] * (max(ids.values(), default=-1) + 1)  # by id; special tokens have none
        self.specials: dict[str, int] = {}  # id by content
        byte_tokens = []
        for token, token_id in ids.items():
            if token_id in special:
                self.specials[token] = token_id
            elif token_id in added:
                self.spellings[token_id] = str(added[token_id].content).encode()
            else:
                self.spellings[token_id] = spell(token, kind) or b""
                if kind == "byte_fallback" and is_byte_token(token):
                    byte_tokens.append(token_id)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        begun = tokenizer("")["input_ids"][:1]
        self.prefix: list[int] = begun if begun == [tokenizer.bos_token_id] else []  # begins every text
        self._ids = self._by_spelling(byte_tokens)
        self._lengths = sorted({len(spelling) for spelling in self._ids}, reverse=True)
        self._backend = _plain_backend(tokenizer)

    def __len__(self) -> int:
        return len(self.spellings)

    def id_of(self, spelling: bytes) -> int | None:
        """Return the token with these bytes: the lowest id, byte fallbacks last; None if there is none."""
        return self._ids.get(spelling)

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes of tokens; special tokens and unknown ids have none."""
        size = len(self.spellings)
        return b"".join(self.spellings[token_id] for token_id in token_ids if token_id < size)

    def encode(self, data: bytes) -> list[int]:
        """Return tokens whose bytes are `data`, without special tokens; text is tokenised as usual.

        Bytes that are not UTF-8, and text that the tokenizer would alter, are covered by the longest tokens
        from the left. Bytes that no token has are left out.
        """
        token_ids: list[int] = []
        for run, is_text in _runs(data):
            if is_text:
                found = self._backend.encode(run.decode(), add_special_tokens=False).ids
                if self.bytes_of(found) == run:
                    token_ids += found
                    continue
            token_ids += self._longest(run)
        return token_ids

    def _by_spelling(self, byte_tokens: Sequence[int]) -> dict[bytes, int]:
        fallbacks = set(byte_tokens)
        regular = (token_id for token_id in range(len(self.spellings)) if token_id not in fallbacks)
        ids: dict[bytes, int] = {}
        for token_id in itertools.chain(regular, sorted(fallbacks)):
            if self.spellings[token_id]:
                ids.setdefault(self.spellings[token_id], token_id)
        return ids

    def _longest(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            left = len(data) - at
            for length in self._lengths:
                token_id = self._ids.get(data[at : at + length]) if length <= left else None
                if token_id is not None:
                    yield token_id
                    at += length
                    break
            else:
                at += 1


def _plain_backend(tokenizer: Any) -> Any:
    """Return the tokenizer's model without special tokens and without a space put before each text.

    Special tokens must not be made of text: a user may write "<|im_end|>".
    """
    backend = tokenizer.backend_tokenizer
    spec = json.loads(backend.to_str())
    spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    spec["normalizer"] = _without_prefix(spec["normalizer"])
    spec["pre_tokenizer"] = _without_prefix(spec["pre_tokenizer"])
    return type(backend).from_str(json.dumps(spec))  # this package does not import tokenizers


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        kept = [changed for part in step[name] if (changed := _without_prefix(part)) is not None]
        return {**step, name: kept} if kept else None
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel" and "add_prefix_space" in step:
        return {**step, "add_prefix_space": False}
    return step


def _runs(data: bytes) -> Iterator[tuple[bytes, bool]]:
    """Split bytes into runs that are UTF-8 text and runs that are not."""
    while data:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start], True
            yield data[error.start : error.end], False
            data = data[error.end :]
        else:
            yield data, True
            return


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


BYTE_OF = _byte_level_alphabet()
"""Byte of each character of GPT-2's byte-level alphabet."""
