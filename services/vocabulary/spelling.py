"""The vocabulary of one tokenizer: the bytes of each token, and the tokens of any bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from gammaray.errors import InvalidArgumentError
from gammaray.gguf import check_packages, is_gguf, pretrained_arguments, read_header
from gammaray.vocabulary import decoder_kind, is_byte_token, spell

__all__ = ["Vocabulary", "incomplete_tail", "load_vocabulary"]


class Vocabulary:
    """The tokens of a tokenizer.

    Args:
        tokenizer: A tokenizer of `transformers` that is backed by `tokenizers`.

    Attributes:
        spellings: Bytes of each token, by id; empty for special tokens and for ids without a token.
        specials: Id of each special token, by its content.
        eos_token_id: End of sequence; None if the tokenizer names none.
        prefix: Special tokens with which the tokenizer begins every text.

    Raises:
        ValueError: The bytes of its tokens are not known; the message says why.
    """

    def __init__(self, tokenizer: Any) -> None:
        kind = decoder_kind(tokenizer)
        if kind == "other":
            raise ValueError("its tokens are neither byte-level nor SentencePiece with byte fallback")
        ids: dict[str, int] = tokenizer.get_vocab()
        added = tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        self.spellings = [b""] * (max(ids.values(), default=-1) + 1)
        self.specials: dict[str, int] = {}
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
        self.prefix: list[int] = begun if begun == [tokenizer.bos_token_id] else []
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


def _plain_backend(tokenizer: Any) -> Tokenizer:
    """Return the tokenizer's model without special tokens and without a space put before each text.

    Special tokens must not be made of text: a user may write "<|im_end|>".
    """
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    spec.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    spec["normalizer"] = _without_prefix(spec["normalizer"])
    spec["pre_tokenizer"] = _without_prefix(spec["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(spec))


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


def incomplete_tail(data: bytes) -> int:
    """Return how many bytes at the end are the begin of a character of which more bytes may follow."""
    for count in range(1, min(3, len(data)) + 1):
        first = data[-count]
        if first >= 0xC0:
            length = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return count if count < length else 0
        if first < 0x80:
            break
    return 0
