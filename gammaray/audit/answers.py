"""Answers of a server, checked field by field: they come from a program that is not trusted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gammaray.errors import InternalError, rendering

_REPLACEMENT = "\ufffd"
_MAX_CHOICES = 128

_COLUMNS = ("token_logprobs", "top_logprobs")


class AnswerError(InternalError):
    """A field of a server's answer, such as `choices[0].text`, is malformed; `curl` asks for it, if known."""

    def __init__(self, field: str, got: object, allowed: str, curl: str = "") -> None:
        self.field, self.curl = field, curl
        super().__init__(f"answer: {field}: got {rendering(got)[:80]}, allowed: {allowed}")


@dataclass(frozen=True)
class Token:
    """One generated token as the server reports it."""

    key: str  # id or bytes if they are reported, else the text
    text: str
    logprob: float | None  # None if the server gives none
    listed: tuple[tuple[str, float], ...]  # of the alternatives; several tokens may have one key

    @cached_property
    def cells(self) -> Mapping[str, float]:
        """The alternatives by key. Those whose text contains a part of a character are left out, as several
        tokens have the same one."""
        found: dict[str, float] = {}
        for key, logprob in self.listed:
            if _REPLACEMENT not in key:
                other = found.get(key, -1e4)
                high, low = max(logprob, other), min(logprob, other)
                found[key] = high + math.log1p(math.exp(low - high))
        return found

    @property
    def lp(self) -> float | None:
        """Its log-probability, preferably as it stands among the alternatives."""
        return self.cells.get(self.key, self.logprob)


@dataclass(frozen=True)
class Choice:
    text: str
    tokens: tuple[Token, ...]  # empty without log-probabilities
    finish_reason: str | None
    prompt_ids: tuple[int, ...] = ()  # empty without `return_token_ids`
    token_ids: tuple[int, ...] = ()  # likewise
    favourites: tuple[str, ...] = ()  # likeliest id at each prompt position; "" if unknown, as at the first


@dataclass(frozen=True)
class Answer:
    """A whole response, of at least one choice."""

    choices: tuple[Choice, ...]  # by index
    usage: tuple[int, int, int] | None  # prompt, completions, both; None if not reported
    is_gammaray: bool = False
    curl: str = ""  # command that asks for it

    @property
    def choice(self) -> Choice:
        return self.choices[0]


def decoded(data: bytes) -> Any:
    """Parse JSON; raises AnswerError if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise AnswerError("body", data[:60], "JSON") from None


def parse_answer(body: Any) -> Answer:
    """Return the answer that a body of completions or chats holds; AnswerError names a malformed field."""
    fields = _an("body", body, dict)
    choices = _an("choices", fields.get("choices"), list)
    if not 1 <= len(choices) <= _MAX_CHOICES:
        raise AnswerError("choices", f"{len(choices)} entries", f"1 to {_MAX_CHOICES}")
    parsed: dict[int, Choice] = {}
    for i, choice in enumerate(choices):
        index = _an(f"choices[{i}]", choice, dict).get("index", i)
        parsed[_an(f"choices[{i}].index", index, int)] = parse_choice(f"choices[{i}]", choice, "message")
    return Answer(
        tuple(parsed[index] for index in sorted(parsed)),
        parse_usage(fields.get("usage")),
        "gammaray" in fields,
    )


def parse_choice(path: str, choice: Mapping[str, Any], message: str) -> Choice:
    """Return a choice at `path`, whose message is in "message", or in an event of a stream in "delta"."""
    held = choice
    if message in choice:
        path, held = f"{path}.{message}", _an(f"{path}.{message}", choice[message], dict)
    text = held.get("text", held.get("content"))
    reason = choice.get("finish_reason")
    return Choice(
        "" if text is None else _an(f"{path}.text", text, str),
        tuple(_tokens(f"{path}.logprobs", choice.get("logprobs"))),
        None if reason is None else _an(f"{path}.finish_reason", reason, str),
        _ids(f"{path}.prompt_token_ids", choice.get("prompt_token_ids")),
        _ids(f"{path}.token_ids", choice.get("token_ids")),
        tuple(_favourites(f"{path}.prompt_logprobs", choice.get("prompt_logprobs"))),
    )


def _ids(path: str, ids: Any) -> tuple[int, ...]:
    return tuple(_an(path, one, int) for one in _an(path, ids or [], list))


def _favourites(path: str, listed: Any) -> Iterator[str]:
    for i, entry in enumerate(_an(path, listed or [], list)):
        found = _an(f"{path}[{i}]", entry or {}, dict)
        firsts = (key for key, one in found.items() if _an(f"{path}[{i}].{key}", one, dict).get("rank") == 1)
        yield next(firsts, "")


def text_of(key: str) -> str:
    """Return the text of a token's key, without the id that some servers report."""
    return re.sub(r"^\d+:(?=.)", "", key, flags=re.DOTALL)


def parse_usage(usage: Any) -> tuple[int, int, int] | None:
    """Return prompt, completion and total tokens; None if a server reports no usage."""
    if usage is None:
        return None
    fields = _an("usage", usage, dict)
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    prompt, completion, total = (_an(f"usage.{name}", fields.get(name), int) for name in names)
    return prompt, completion, total


def _an(field: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        names = {dict: "an object", list: "a list", str: "a text", int: "an integer"}
        raise AnswerError(field, value, names[kind])
    return value


def _tokens(path: str, logprobs: Any) -> list[Token]:
    if logprobs is None:
        return []
    fields = _an(path, logprobs, dict)
    if (content := fields.get("content")) is not None:
        return [
            _listed(f"{path}.content[{i}]", t) for i, t in enumerate(_an(f"{path}.content", content, list))
        ]
    if fields.get("tokens") is None:
        return []
    texts = _an(f"{path}.tokens", fields["tokens"], list)
    columns = [_an(f"{path}.{n}", fields.get(n) or [None] * len(texts), list) for n in _COLUMNS]
    if any(len(column) != len(texts) for column in columns):
        raise AnswerError(path, [len(texts), *map(len, columns)], "lists of one length")
    found = []
    for i, (text, logprob, top) in enumerate(zip(texts, *columns, strict=True)):
        text = _an(f"{path}.tokens[{i}]", text, str)
        top = _an(f"{path}.top_logprobs[{i}]", top or {}, dict)
        listed = tuple((key, _logprob(f"{path}.top_logprobs[{i}]", value)) for key, value in top.items())
        own = None if logprob is None else _logprob(f"{path}.token_logprobs[{i}]", logprob)
        found.append(Token(text, text, own, listed))
    return found


def _listed(path: str, entry: Any) -> Token:
    """Parse a token in the format of chats, which lists alternatives, equal texts one by one."""
    fields = _an(path, entry, dict)
    top = _an(f"{path}.top_logprobs", fields.get("top_logprobs") or [], list)
    listed = []
    for i, other in enumerate(top):
        key = _key(f"{path}.top_logprobs[{i}]", other)
        listed.append((key, _logprob(f"{path}.top_logprobs[{i}].logprob", other.get("logprob"))))
    own = fields.get("logprob")
    return Token(
        _key(path, entry),
        _an(f"{path}.token", fields.get("token"), str),
        None if own is None else _logprob(f"{path}.logprob", own),
        tuple(listed),
    )


def _key(path: str, entry: Any) -> str:
    fields = _an(path, entry, dict)
    text: str = _an(f"{path}.token", fields.get("token"), str)
    if isinstance(token_id := fields.get("id"), int):
        return f"{token_id}:{text}"
    given: Any = fields.get("bytes")
    if _REPLACEMENT not in text or not isinstance(given, list) or given == list(_REPLACEMENT.encode()):
        return text
    try:
        return f"bytes:{bytes(given).hex()}"
    except (TypeError, ValueError):
        raise AnswerError(f"{path}.bytes", given, "integers from 0 to 255") from None


def _logprob(path: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value <= 0.01:
        raise AnswerError(path, value, "a log-probability, at most 0")
    return float(max(min(value, 0), -10_000))
