"""Incremental parser of tool calls in a completion's text.

Texts and calls are the same however the text is split. A call is reported as soon as its name is known and
its arguments begin, and its arguments as they come. So the arguments of a call that breaks off, or that are
no JSON, are what the model wrote. What only resembles a call is text: no JSON, no name of a tool, or
arguments that are no object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, TypeAlias

from orchestrator.api.http.tools.formats import CLOSE, OPEN, CallFamily

__all__ = ["ArgumentText", "CallBegun", "CallEnded", "CallEvent", "CallParser", "PlainText"]

_SPACE = " \t\r\n"
_MAX_HELD_SPACE = 64
"""Whitespace that is held back, as it is dropped before a call."""

_MAX_DEPTH = 200
"""Nesting of a call's JSON; a deeper one is text."""

_PIECE = 1024
"""Characters that are read at once."""

_MAX_EARLY = 8
"""Objects in a call that are tried as its arguments before all of it is read. Each try decodes the call."""

_ARGUMENTS = ("arguments", "parameters")

_JSON_CHARS = frozenset(_SPACE + '"{}[]:,+-.0123456789aeflnrstuE')
"""Characters of JSON outside of strings."""


@dataclass(frozen=True)
class PlainText:
    """A piece of the message's text."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call begins; calls are numbered from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ArgumentText:
    """A piece of the arguments of a call, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnded:
    """The arguments of a call end; they are not whole if they are no JSON or the completion ends in them."""

    index: int
    is_whole: bool


CallEvent: TypeAlias = PlainText | CallBegun | ArgumentText | CallEnded


class _State(Enum):
    TEXT = auto()
    LEAD = auto()  # before the object of a call
    OBJECT = auto()
    BROKEN = auto()  # in arguments that are no JSON
    AFTER = auto()  # after the object


class CallParser:
    """Finds the tool calls in one completion.

    Args:
        family: Form of the calls.
        names: Names of the tools.
        new_id: Returns the id of the call with this index.
        max_calls: Further calls are dropped; None: no bound.
        is_after_marker: Whether the prompt ends with the marker before the calls.
    """

    def __init__(
        self,
        family: CallFamily,
        names: frozenset[str],
        new_id: Callable[[int], str],
        *,
        max_calls: int | None = None,
        is_after_marker: bool = False,
    ) -> None:
        self._family, self._names, self._new_id, self._max_calls = family, names, new_id, max_calls
        self._marker = OPEN[family]
        is_bare = family is CallFamily.LLAMA  # a message may begin with a call without a marker
        self._state = _State.LEAD if is_bare or is_after_marker else _State.TEXT
        self._pending = ""  # text that may be the beginning of a marker, and whitespace before
        self._raw: list[str] = []  # characters of what may become a call
        self._json = _JsonObject()
        self._start = 0  # of the object in `_raw`
        self._in_arguments = self._is_begun = self._is_list = False
        self._num_early = 0  # objects of the call that were tried as its arguments
        self._num_seen = 0  # calls, dropped ones included
        self._events: list[CallEvent] = []
        self._texts: list[str] = []  # of the last event, to be joined

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._num_seen if self._max_calls is None else min(self._num_seen, self._max_calls)

    def push(self, text: str) -> list[CallEvent]:
        """Add the next piece of the completion; return what it completes."""
        # In pieces, as the rest of a piece is copied at each marker in it.
        for start in range(0, len(text), _PIECE):
            self._read(text[start : start + _PIECE])
        return self._taken()

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._state is _State.TEXT:
                at = self._in_text(text, at)
            else:
                at += self._takes(text[at])

    def finish(self) -> list[CallEvent]:
        """Return what is left at the end of the completion."""
        rest, raw = self._pending, "".join(self._raw)
        if self._in_arguments:
            self._emit(ArgumentText(self._num_seen - 1, raw if self._state is _State.BROKEN else ""))
            self._emit(CallEnded(self._num_seen - 1, is_whole=False))
        elif self._state is _State.LEAD or (self._state is _State.OBJECT and not self._is_begun):
            rest = raw
        if rest.strip(_SPACE + ",;") or self._num_seen == 0:
            self._emit(PlainText(rest))
        self._state, self._pending, self._raw, self._in_arguments = _State.TEXT, "", [], False
        return self._taken()

    def _emit(self, event: CallEvent) -> None:
        """Add an event; pieces of the same text are joined."""
        if (
            not isinstance(event, PlainText)
            and self._max_calls is not None
            and event.index >= self._max_calls
        ):
            return
        if isinstance(event, (PlainText, ArgumentText)):
            if not event.text:
                return
            last = self._events[-1] if self._events else None
            if type(last) is type(event):
                self._texts.append(event.text)
                return
        self._join()
        self._events.append(event)
        self._texts = [event.text] if isinstance(event, (PlainText, ArgumentText)) else []

    def _join(self) -> None:
        if len(self._texts) > 1:
            last = self._events[-1]
            assert isinstance(last, (PlainText, ArgumentText))
            self._events[-1] = replace(last, text="".join(self._texts))

    def _taken(self) -> list[CallEvent]:
        self._join()
        events, self._events, self._texts = self._events, [], []
        return events

    def _in_text(self, text: str, at: int) -> int:
        """Read text from a position on, up to a marker; return the position after what was read."""
        pending = self._pending + text[at:]
        found = pending.find(self._marker)
        if found < 0:
            cut = _before_space(pending, len(pending) - _num_begun(pending, self._marker))
            self._emit(PlainText(pending[:cut]))
            self._pending = pending[cut:]
            return len(text)
        cut, end = _before_space(pending, found), found + len(self._marker)
        self._emit(PlainText(pending[:cut]))
        self._pending, self._is_list = "", False
        self._state, self._raw = _State.LEAD, list(pending[cut:end])
        return len(text) - (len(pending) - end)

    def _takes(self, char: str) -> bool:
        """Read the next character; return False if it is to be read again, in another state."""
        if self._state is _State.LEAD:
            return self._lead(char)
        if self._state is _State.OBJECT:
            return self._object(char)
        if self._state is _State.BROKEN:
            return self._broken(char)
        return self._after(char)

    def _lead(self, char: str) -> bool:
        if char == "{":
            self._state, self._json, self._start = _State.OBJECT, _JsonObject(), len(self._raw)
            self._is_begun, self._num_early = False, 0
            return False
        opens = char == "[" and self._family is CallFamily.MISTRAL and not self._is_list
        if not opens and char not in _SPACE:
            return self._fail()
        self._is_list = self._is_list or opens
        self._raw.append(char)
        return True

    def _object(self, char: str) -> bool:
        if not self._json.takes(char):
            if self._in_arguments:
                self._state, self._raw = _State.BROKEN, []
                return False
            if not self._is_begun:
                return self._fail()
            self._state, self._raw = _State.AFTER, []
            return False
        depth = self._json.depth
        if self._in_arguments:
            self._emit(ArgumentText(self._num_seen - 1, char))
            if depth == 1:
                self._in_arguments = False
                self._emit(CallEnded(self._num_seen - 1, is_whole=True))
        elif self._is_begun:
            if depth == 0:
                self._state, self._raw = _State.AFTER, []
        else:
            self._raw.append(char)
            self._begins(char, depth)
        return True

    def _begins(self, char: str, depth: int) -> None:
        """Begin a call if its name is known and its arguments begin, or if the object is read."""
        if char == "{" and depth == 2 and not self._json.in_string and self._num_early < _MAX_EARLY:
            self._num_early += 1
            # The name after the arguments is rarer: then the call begins once all is read.
            head = _loaded("".join(self._raw[self._start : -1]) + "null}")
            if head and next(reversed(head)) in _ARGUMENTS and self._is_tool(head.get("name")):
                self._begin(head["name"])
                self._in_arguments = True
                self._emit(ArgumentText(self._num_seen - 1, char))
        elif depth == 0:
            call = _loaded("".join(self._raw[self._start :]))
            arguments = None if call is None else _arguments(call)
            if call is None or arguments is None or not self._is_tool(call.get("name")):
                self._fail()
                return
            self._begin(call["name"])
            self._emit(ArgumentText(self._num_seen - 1, arguments))
            self._emit(CallEnded(self._num_seen - 1, is_whole=True))
            self._state, self._raw = _State.AFTER, []

    def _is_tool(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._names

    def _begin(self, name: str) -> None:
        self._is_begun = True
        self._num_seen += 1
        index = self._num_seen - 1
        self._emit(CallBegun(index, self._new_id(index), name))

    def _fail(self) -> bool:
        """Make text of what was read."""
        self._emit(PlainText("".join(self._raw)))
        self._state, self._raw = _State.TEXT, []
        return False

    def _broken(self, char: str) -> bool:
        index = self._num_seen - 1
        if self._family is not CallFamily.HERMES:
            self._emit(ArgumentText(index, char))
            return True
        self._raw.append(char)
        raw = "".join(self._raw)
        if raw == CLOSE:
            self._emit(CallEnded(index, is_whole=False))
            self._state, self._raw, self._in_arguments = _State.TEXT, [], False
            return True
        kept = _num_begun(raw, CLOSE)
        self._emit(ArgumentText(index, raw[: len(raw) - kept]))
        self._raw = list(raw[len(raw) - kept :])
        return True

    def _after(self, char: str) -> bool:
        """Read what may come between the calls of a message."""
        if not self._raw and char in _SPACE:
            return True
        if self._family is CallFamily.HERMES:
            if not self._raw and char == "}":  # small models write one too many
                return True
            raw = "".join(self._raw) + char
            if CLOSE.startswith(raw):
                self._raw.append(char)
                if raw == CLOSE:
                    self._state, self._raw = _State.TEXT, []
                return True
        elif self._family is CallFamily.LLAMA:
            if char in ",;{":
                self._state, self._raw = _State.LEAD, [] if char == "{" else [char]
                return char != "{"
        elif self._is_list and char in ",]":
            self._state, self._raw = (_State.LEAD, [","]) if char == "," else (_State.TEXT, [])
            return True
        self._state, self._pending, self._raw = _State.TEXT, "".join(self._raw), []
        return False


class _JsonObject:
    """Follows the brackets and strings of a JSON object character by character."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self.in_string = self._is_escaped = False

    @property
    def depth(self) -> int:
        """Number of open brackets."""
        return len(self._closers)

    def takes(self, char: str) -> bool:
        """Read a character; return False, and ignore it, if no JSON has it there."""
        if self.in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.in_string = False
            return True
        if char == '"':
            self.in_string = True
        elif char in "{[":
            if self.depth == _MAX_DEPTH:
                return False
            self._closers.append("}" if char == "{" else "]")
        elif char in "}]":
            if not self._closers or self._closers[-1] != char:
                return False
            self._closers.pop()
        return char in _JSON_CHARS


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _arguments(call: Mapping[str, Any]) -> str | None:
    """Return the arguments of a call as JSON, None if they are no object; some models quote them."""
    value: Any = next((call[key] for key in _ARGUMENTS if key in call), {})
    try:
        if isinstance(value, str):
            return value if isinstance(json.loads(value), dict) else None
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _before_space(text: str, end: int) -> int:
    """Return where the whitespace before `end` begins, as far as it is held back."""
    start = max(0, end - _MAX_HELD_SPACE)
    return start + len(text[start:end].rstrip(_SPACE))


def _num_begun(text: str, marker: str) -> int:
    """Return the length of the longest end of a text with which a marker begins."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
