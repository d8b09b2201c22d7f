"""Control tokens of chat prompts: what a chat template writes is one, the same text in a message is text.

A template writes control tokens, such as `<|im_end|>`, as text among the texts of messages. So a character
that no message has is put after each character of such a text in a message before it is rendered (`mark`).
To encode the prompt, the control tokens that are not marked get secret names, and the marks go. The encoder
is a copy of the model's tokenizer whose control tokens have these names: it takes their former names as text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

_SIGN = re.compile(r"[^\w\s]")
"""A character of a marker; added tokens without one are words or spaces."""

_FIRST_MARK = 0xE000
"""Unicode's first character for private use; the mark is the first from here on that no message has."""


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation; a mark, if any, follows each character of text that is no control token."""

    marked: str
    mark: str = ""

    @cached_property
    def text(self) -> str:
        """The prompt without marks, also where a template has escaped them for JSON."""
        if not self.mark:
            return self.marked
        return self.marked.replace(self.mark, "").replace(json.dumps(self.mark)[1:-1], "")


class Controls:
    """The control tokens of a model: its special tokens, and the added ones that its template writes."""

    def __init__(self, template: str, added_tokens: Mapping[str, bool]) -> None:
        special = [text for text, is_special in added_tokens.items() if is_special]
        written = [text for text in added_tokens if text in template and _SIGN.search(text)]
        self._names = {text: f"<{secrets.randbits(128)}>" for text in {*special, *written}}
        # Templates may change the case.
        self._of_answer, self._of_others = (any_of(texts, re.IGNORECASE) for texts in (special, self._names))

    def mark(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], str]:
        """Return messages and tools in which text that spells a control token is marked, and the mark.

        In the content of the assistant's messages only special tokens are text: what decoded text shows, such
        as `<think>`, are the tokens that the model wrote, and templates may look for them.
        """
        if not self._names or not any(map(self._of_others.search, _texts([messages, tools]))):
            return messages, tools, ""
        used = set[str]().union(*_texts([messages, tools]))
        mark = next(char for char in map(chr, range(_FIRST_MARK, 0x110000)) if char not in used)
        marked = [
            {
                name: _marked(
                    value, self._of_answer if is_answer and name == "content" else self._of_others, mark
                )
                for name, value in message.items()
            }
            for message in messages
            for is_answer in (message["role"] == "assistant",)
        ]
        return marked, _marked(list(tools), self._of_others, mark), mark

    def may_be_in(self, data: bytes) -> bool:
        """Return whether a JSON text may have a control token in a text, perhaps escaped."""
        return b"\\u" in data or self._of_others.search(data.decode("utf-8", "replace")) is not None

    def encoder(self, backend: Any) -> Encoder:
        """Return what encodes marked prompts; takes some 100 ms for a large vocabulary."""
        return Encoder(backend, self._names)


class Encoder:
    """Encodes prompts of a chat template; the names of the control tokens have to stay secret."""

    def __init__(self, backend: Any, names: Mapping[str, str]) -> None:
        definition = json.loads(backend.to_str())
        ids = {
            token["id"]: names.get(token["content"], token["content"]) for token in definition["added_tokens"]
        }
        for token in definition["added_tokens"]:
            token["content"] = ids[token["id"]]
        model = definition["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        self.backend = Tokenizer.from_str(json.dumps(definition))
        if any(self.backend.token_to_id(name) != token_id for token_id, name in ids.items()):
            raise ValueError("the copy has other token ids")
        self._names = names

    def named(self, prompt: ChatPrompt) -> str:
        """Return the text that `backend` encodes."""
        unmarked = any_of(self._names, end=f"(?!{re.escape(prompt.mark)})")
        marked = unmarked.sub(lambda found: self._names[found[0]], prompt.marked)
        return ChatPrompt(marked, prompt.mark).text


def any_of(texts: Collection[str], flags: int = 0, end: str = "") -> re.Pattern[str]:
    """Return the regular expression of the longest of some texts, followed by that of an end."""
    return re.compile((_trie(texts) or "(?!)") + end, flags)


def _trie(texts: Collection[str]) -> str:
    """Return a regular expression of the longest of some texts, which tries each character once."""
    endings: dict[str, list[str]] = {}
    for text in filter(None, texts):
        endings.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _trie(rest) for first, rest in endings.items()]
    return f"(?:{'|'.join(branches)}){'?' if '' in texts else ''}" if branches else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from _texts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _texts(entry)


def _marked(value: Any, found: re.Pattern[str], mark: str) -> Any:
    """Return a JSON value with a mark after each character of the texts that are found."""
    if isinstance(value, str):
        return found.sub(lambda one: mark.join(one[0]) + mark, value)
    if isinstance(value, Mapping):
        return {_marked(key, found, mark): _marked(entry, found, mark) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(entry, found, mark) for entry in value]
    return value
