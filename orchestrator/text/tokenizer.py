"""Encoding and decoding of text: a wrapper of the target model's tokenizer and configuration."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from gammaray.checks import check_encodable
from gammaray.demo_pair import DEMO_PAIR
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.check_pool import CheckPool
from gammaray.grammar.matcher import GrammarCompiler, GrammarState
from gammaray.vocabulary import decoder_kind, spell, vocabulary_sha256
from orchestrator.text.chat import ChatFormat, chat_format, render
from orchestrator.text.controls import ChatPrompt, Encoder
from orchestrator.text.cpu_threads import in_thread

_logger = logging.getLogger(__name__)

LONG_TEXT = 8192
"""Characters or token ids from which on they are processed in a thread, not to block other sessions."""

_MANY_TOKENS = 4096
"""From this many tokens on, decoding takes more than a millisecond."""


def served_name(model: str) -> str:
    """Return the name that clients use for a model: its hub name, or that of its directory."""
    path = Path(model)
    return path.resolve().name if model != DEMO_PAIR and path.is_dir() else model


@dataclass
class _SharedEncoding:
    """A long text that is being tokenised for one or more callers."""

    work: asyncio.Task[tuple[int, ...]]
    one_by_one: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_callers: int = 0


class Tokenizer:
    """The tokenizer of a model, with the values of its configuration that the orchestrator needs."""

    def __init__(self, model: str) -> None:
        """Load tokenizer and configuration from a directory or, by name, the hub's cache."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            config: Any = AutoConfig.from_pretrained(model).get_text_config()
        except (OSError, ValueError, KeyError) as error:
            raise InvalidArgumentError(
                "model", f"{model} ({error})", "a directory or hub name of a causal LM with its tokenizer"
            ) from error
        self.vocab_size = int(config.vocab_size)  # the model's; its tokenizer may have fewer token ids
        self.max_context = int(getattr(config, "max_position_embeddings", None) or 2**20)
        self.eos_token_ids = _eos_token_ids(model, config, self._tokenizer)
        self.vocab_sha256 = vocabulary_sha256(self._tokenizer.get_vocab())
        self._added = dict(self._tokenizer.added_tokens_decoder)
        special = (token_id for token_id, token in self._added.items() if token.special)
        self._special_ids = frozenset(special) | frozenset(self._tokenizer.all_special_ids)
        self.chat_format: ChatFormat = chat_format(self._tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._backend = plain_backend(self._tokenizer)
        self._spelling = None if self._backend is None else spelling_of(self._backend)
        self._encoding: dict[tuple[str, bool], _SharedEncoding] = {}

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`; if `is_start`, with the tokenizer's special tokens added.

        Lone surrogates, which are invalid Unicode, raise InvalidArgumentError, here and below.
        """
        return self._encode(self._backend, text, is_start)

    def encode_marked(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Return the token ids of a marked conversation; the first call takes some 100 ms."""
        if self._marked_encoder is None:
            allowed = "texts without them: this model's tokenizer cannot encode them as text"
            raise InvalidArgumentError("messages", "a text with the name of a control token", allowed)
        return self._encode(self._marked_encoder.backend, self._marked_encoder.named(prompt), True)

    @cached_property
    def _marked_encoder(self) -> Encoder | None:
        try:
            return None if self._backend is None else self.chat_format.controls.encoder(self._backend)
        except Exception:  # the copy of a tokenizer whose algorithm needs its control tokens is invalid
            _logger.exception("the texts of control tokens in messages will be refused")
            return None

    def _encode(self, backend: Any, text: str, is_start: bool) -> tuple[int, ...]:
        check_encodable("prompt", text)
        token_ids: list[int]
        if backend is None:
            token_ids = self._tokenizer(text, add_special_tokens=is_start, verbose=False)["input_ids"]
        else:  # without the offsets and masks of all tokens, which take half as much time and memory again
            token_ids = backend.encode_batch_fast([text], add_special_tokens=is_start)[0].ids
        bos = self._tokenizer.bos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:
            token_ids = token_ids[1:]  # a chat template has already added it
        return tuple(token_ids)

    def min_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of a text, without tokenising it; 0 if none is known."""
        if self._spelling is None:
            return 0
        max_bytes, unknown = self._spelling
        return -(-len(text.encode(errors="surrogatepass").translate(None, unknown)) // max_bytes)

    async def encode_long(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the token ids of a long text, which is tokenised in a thread.

        Concurrent calls for the same text, such as those of a request's choices, share the work. They return
        in different iterations of the event loop, because the callers' next step also scales with the text.
        """
        key = text, is_start
        if (shared := self._encoding.get(key)) is None:
            work = asyncio.create_task(in_thread(self.encode, text, is_start=is_start))
            shared = self._encoding[key] = _SharedEncoding(work)
        shared.num_callers += 1
        try:
            token_ids = await asyncio.shield(shared.work)
        finally:
            shared.num_callers -= 1
            if shared.num_callers == 0:
                self._encoding.pop(key)
                shared.work.cancel()  # without callers, drop work that has not started
        async with shared.one_by_one:
            await asyncio.sleep(0)
        return token_ids

    async def ids_of(self, text: str | tuple[int, ...], *, is_start: bool) -> tuple[int, ...]:
        """Return the token ids of a text or of token ids; a long text is tokenised in a thread."""
        if not isinstance(text, str):
            return text
        if len(text) < LONG_TEXT:
            return self.encode(text, is_start=is_start)
        return await self.encode_long(text, is_start=is_start)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, without special tokens."""
        if len(token_ids) >= _MANY_TOKENS and self._joins_bytes:
            # The library holds the GIL until all tokens are decoded; this loop lets other threads run.
            shown = (token_id for token_id in token_ids if token_id not in self._special_ids)
            return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the prompt that the model's chat template makes of `messages` and of OpenAI's `tools`."""
        return render(self._tokenizer, messages, tools, self.chat_format.roles)

    def check_pool(self, num_processes: int) -> CheckPool:
        """Return processes that check grammars; takes some 100 ms for a large vocabulary."""
        return CheckPool(self._definition, self.vocab_size, self.eos_token_ids, num_processes)

    def begin_grammar(self, grammar: str) -> GrammarState:
        """Compile a checked grammar, and return its state before the first token. Thread-safe."""
        return self._grammars.begin(grammar)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        definition = self._definition
        try:
            return GrammarCompiler(definition, self.vocab_size, self.eos_token_ids)
        except Exception as error:  # llguidance raises different ones
            raise _unusable(error) from error

    @property
    def _definition(self) -> str:
        try:
            definition: str = self._tokenizer.backend_tokenizer.to_str()
        except Exception as error:  # tokenizers in Python have no backend
            raise _unusable(error) from error
        return definition

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a special token, which decoded text omits."""
        return token_id in self._special_ids

    @cached_property
    def has_exact_bytes(self) -> bool:
        """Whether the text of tokens is the concatenation of their bytes, independent of their neighbours."""
        return self._decoder_kind != "other"

    @cached_property
    def _joins_bytes(self) -> bool:
        return self._decoder_kind == "byte_level" and not self._tokenizer.clean_up_tokenization_spaces

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of a single token as bytes, which may be a part of a character."""
        if token_id >= self.vocab_size:  # invalid id from a client; caching these would exhaust memory
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the model's vocabulary is often padded beyond the tokenizer's
            return b""
        spelling = spell(token, self._decoder_kind)
        return self.decode([token_id]).encode() if spelling is None else spelling

    @cached_property
    def _decoder_kind(self) -> str:
        return decoder_kind(self._tokenizer)


def plain_backend(tokenizer: Any) -> Any:
    """Return the Rust tokenizer if `transformers` adds nothing to what it encodes, else None."""
    if getattr(type(tokenizer), "_encode_plus", None) is not TokenizersBackend._encode_plus:
        return None
    if type(tokenizer).__call__ is not PreTrainedTokenizerBase.__call__:
        return None
    tokenizer("")  # sets the options of the backend: no truncation, no padding, special tokens in texts
    return tokenizer.backend_tokenizer


def spelling_of(backend: Any) -> tuple[int, bytes] | None:
    """Return the length of the longest token in bytes, and the bytes that no token spells.

    None if tokens may lack other bytes of a text: normalisers, some splits, and added tokens that strip what
    is around them drop parts of it.
    """
    definition = json.loads(backend.to_str())
    splits, added, model = definition["pre_tokenizer"] or {}, definition["added_tokens"], definition["model"]
    steps = splits.get("pretokenizers", [splits])
    drops = (
        definition["normalizer"] is not None
        or model["type"] != "BPE"
        or all(step.get("type") != "ByteLevel" for step in steps)
        or any(step.get("type") not in ("ByteLevel", "Digits", "Split") for step in steps)
        or any(step.get("behavior") == "Removed" for step in steps)
        or any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if drops:
        return None
    spelled = b"".join(spell(token, "byte_level") or b"" for token in model["vocab"] if len(token) == 1)
    longest = max(map(len, model["vocab"]), default=1)  # each character stands for a byte
    longest = max(longest, *(len(token["content"].encode()) for token in added), 1)
    return longest, bytes(byte for byte in range(256) if byte not in spelled)


def _unusable(error: Exception) -> InvalidArgumentError:
    got = f"a grammar ({type(error).__name__}: {error})"
    return InvalidArgumentError("grammar", got, "none: the model's tokenizer cannot be used by llguidance")


def _eos_token_ids(model: str, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end-of-sequence tokens, looked up in the same order as `transformers`' generate."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # older models have no generation config
        found = None
    for candidate in (found, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        if candidate is not None:
            return frozenset(candidate if isinstance(candidate, (list, tuple)) else (candidate,))
    return frozenset()
