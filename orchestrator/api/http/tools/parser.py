"""Incremental parser of tool calls in a completion's text.

Texts and calls are the same however the text is split. A call is reported as soon as its name is known and
its arguments begin, and its arguments as they come. So the arguments of a call that breaks off, or that are
no JSON, are what the model wrote. A call that breaks off before its name is known is dropped. What only
resembles a call is text: no JSON, no name of a tool, or arguments that are no object. Text after a call is
dropped: a message is text and then calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import zip_longest
from typing import Any, TypeAlias

from orchestrator.api.http.tools.formats import CLOSE, OPEN, CallFamily
from orchestrator.text.detokenizer import num_begun

_SPACE = " \t\r\n"
_MAX_HELD_SPACE = 64
"""Whitespace that is held back, as it is dropped before a call."""

MIN_BEGUN = 2
"""Characters of a marker that are no text at the end of a completion; text may end with a single one."""

_MAX_DEPTH = 200
"""Nesting of a call's JSON; a deeper one is text."""

_PIECE = 1024
"""Characters that are read at once."""

_MAX_EARLY = 8
"""Objects in a call that are tried as its arguments before all of it is read. Each try decodes the call."""

_ARGUMENTS = ("arguments", "parameters")

_STRING_OR_SPACE = re.compile(r'("[^"]*"?)|\s+')

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
    """The arguments of a call end; they are whole if they are valid JSON."""

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
    """Finds the tool calls in one completion, and drops those after `max_calls`.

    `new_id` returns the id of the call with an index. With `is_after_marker` the prompt ends with the marker
    before the calls; `sole_name` is the tool that is called if any call begins, empty if it is open.
    """

    def __init__(
        self,
        family: CallFamily,
        names: frozenset[str],
        new_id: Callable[[int], str],
        *,
        max_calls: int | None = None,
        is_after_marker: bool = False,
        sole_name: str = "",
    ) -> None:
        self._family, self._names, self._new_id, self._max_calls = family, names, new_id, max_calls
        self._sole_name = sole_name
        self._marker = OPEN[family]
        is_bare = family is CallFamily.LLAMA  # a message may begin with a call without a marker
        self._state = _State.LEAD if is_bare or is_after_marker else _State.TEXT
        self._pending = ""  # text that may be the beginning of a marker, and whitespace before
        self._raw: list[str] = []  # characters of what may become a call
        self._num_again = 0  # characters of a second marker after the first
        self._json = _JsonObject()
        self._start = 0  # of the object in `_raw`
        self._num_members = 0  # characters of the object up to the last comma between its members
        self._arguments: list[str] = []
        self._is_marked = is_after_marker
        self._num_whole = 0  # calls that were reported with whole arguments
        self._in_arguments = self._is_begun = self._is_list = False
        self._num_early = 0  # objects of the call that were tried as its arguments
        self._num_seen = 0  # calls, dropped ones included
        self._events: list[CallEvent] = []

    @property
    def num_calls(self) -> int:
        return self._num_seen if self._max_calls is None else min(self._num_seen, self._max_calls)

    @property
    def is_whole(self) -> bool:
        """Whether there are calls, all closed and with valid JSON as arguments."""
        is_dropped = self._max_calls is not None and self._num_seen > self._max_calls
        is_open = self._state is _State.OBJECT and self._is_begun and not is_dropped
        return 0 < self.num_calls == self._num_whole and not is_open

    def push(self, text: str) -> list[CallEvent]:
        """Add the next piece of the completion; return what it completes."""
        # In pieces, as the rest of a piece is copied at each marker in it.
        for start in range(0, len(text), _PIECE):
            self._read(text[start : start + _PIECE])
        return self._taken()

    def _read(self, text: str) -> None:
        at = 0
        while at < len(text):
            match self._state:
                case _State.TEXT:
                    at = self._in_text(text, at)
                case _State.LEAD:
                    at += self._lead(text[at])
                case _State.OBJECT:
                    at += self._object(text[at])
                case _State.BROKEN:
                    at += self._broken(text[at])
                case _State.AFTER:
                    at += self._after(text[at])

    def finish(self) -> list[CallEvent]:
        """Return what is left at the end of the completion; the beginning of a marker is no text."""
        if self._in_arguments:
            rest = "".join(self._raw) if self._state is _State.BROKEN else ""
            self._emit(ArgumentText(self._num_seen - 1, rest))
            self._emit(CallEnded(self._num_seen - 1, is_whole=False))
        elif self._state is _State.LEAD or (self._state is _State.OBJECT and not self._is_begun):
            self._cut_call("".join(self._raw))
        elif self._state is _State.TEXT:
            num_held = num_begun(self._pending, self._marker)
            if num_held and self._sole_name:
                self._begin(self._sole_name)
                self._emit(CallEnded(self._num_seen - 1, is_whole=False))
            elif num_held < MIN_BEGUN:
                self._emit(PlainText(self._pending))
        self._pending, self._raw, self._in_arguments = "", [], False
        return self._taken()

    def _cut_call(self, raw: str) -> None:
        """Report a call that ends before its arguments, or in an unusual order of its members."""
        begun = raw[self._start :] if self._state is _State.OBJECT else ""
        head = _loaded(begun + "}") or _loaded(begun[: self._num_members] + "}") or {}
        name = head.get("name")
        if name is None and self._sole_name and (begun or self._is_marked):
            name = self._sole_name
        if isinstance(name, str) and name in self._names:
            self._begin(name)
            if not head.keys().isdisjoint(_ARGUMENTS):
                self._emit(ArgumentText(self._num_seen - 1, _arguments(head) or ""))
            self._emit(CallEnded(self._num_seen - 1, is_whole=False))
        elif name is not None or not (self._is_marked or self._may_be_call(begun)):
            self._emit(PlainText(raw))

    def _may_be_call(self, begun: str) -> bool:
        """Return whether an object begins like that of a call; without a marker it may be another one."""
        compact = _STRING_OR_SPACE.sub(lambda match: match[1] or "", begun)
        return bool(compact) and any(f'{{"name":"{name}"'.startswith(compact) for name in self._names)

    def _emit(self, event: CallEvent) -> None:
        if isinstance(event, PlainText):
            if self._num_seen > 0:
                return
        elif self._max_calls is not None and event.index >= self._max_calls:
            return
        if isinstance(event, CallEnded):
            self._num_whole += event.is_whole
        self._events.append(event)

    def _taken(self) -> list[CallEvent]:
        events, self._events = joined(self._events), []
        return events

    def _in_text(self, text: str, at: int) -> int:
        """Read text from a position on, up to a marker; return the position after what was read."""
        pending = self._pending + text[at:]
        found = pending.find(self._marker)
        if found < 0:
            cut = _before_space(pending, len(pending) - num_begun(pending, self._marker))
            self._emit(PlainText(pending[:cut]))
            self._pending = pending[cut:]
            return len(text)
        cut, end = _before_space(pending, found), found + len(self._marker)
        self._emit(PlainText(pending[:cut]))
        self._pending, self._is_list, self._is_marked, self._num_again = "", False, True, 0
        self._state, self._raw = _State.LEAD, list(pending[cut:end])
        return len(text) - (len(pending) - end)

    # Each of the following reads a character, or returns False if it is to be read again, in another state.

    def _lead(self, char: str) -> bool:
        if char == "{" and not self._num_again:
            self._state, self._json, self._start = _State.OBJECT, _JsonObject(), len(self._raw)
            self._is_begun, self._num_members, self._num_early = False, 0, 0
            return False
        if self._family is CallFamily.HERMES and (self._num_again or char == self._marker[0]):
            return self._again(char)
        opens = char == "[" and self._family is CallFamily.MISTRAL and not self._is_list
        if not opens and char not in _SPACE:
            return self._fail()
        self._is_list = self._is_list or opens
        self._raw.append(char)
        return True

    def _again(self, char: str) -> bool:
        """Read a marker that follows another one, which it replaces."""
        if char != self._marker[self._num_again]:
            return self._fail()
        self._raw.append(char)
        self._num_again += 1
        if self._num_again == len(self._marker):
            self._raw, self._num_again = list(self._marker), 0
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
            self._arguments.append(char)
            if depth == 1:
                self._in_arguments = False
                self._emit(CallEnded(self._num_seen - 1, is_whole=_is_json("".join(self._arguments))))
        elif self._is_begun:
            if depth == 0:
                self._state, self._raw = _State.AFTER, []
        else:
            self._raw.append(char)
            self._begins(char, depth)
        return True

    def _begins(self, char: str, depth: int) -> None:
        """Begin a call if its name is known and its arguments begin, or if the object is read."""
        if char == "," and depth == 1 and not self._json.in_string:
            self._num_members = len(self._raw) - self._start - 1
        if char == "{" and depth == 2 and not self._json.in_string and self._num_early < _MAX_EARLY:
            self._num_early += 1
            # The name after the arguments is rarer: then the call begins once all is read.
            head = _loaded("".join(self._raw[self._start : -1]) + "null}")
            if head and next(reversed(head)) in _ARGUMENTS and self._is_tool(head.get("name")):
                self._begin(head["name"])
                self._in_arguments, self._arguments = True, [char]
                self._emit(ArgumentText(self._num_seen - 1, char))
        elif depth == 0:
            call = _loaded("".join(self._raw[self._start :]))
            arguments = None if call is None else _arguments(call)
            if call is None or arguments is None or not self._is_tool(call.get("name")):
                self._fail()
                return
            self._begin(call["name"])
            self._emit(ArgumentText(self._num_seen - 1, arguments))
            self._emit(CallEnded(self._num_seen - 1, is_whole=_is_json(arguments)))
            self._state, self._raw = _State.AFTER, []

    def _is_tool(self, name: Any) -> bool:
        return isinstance(name, str) and name in self._names

    def _begin(self, name: str) -> None:
        self._is_begun = True
        self._num_seen += 1
        index = self._num_seen - 1
        self._emit(CallBegun(index, self._new_id(index), name))

    def _fail(self) -> bool:
        """Treat what was read as text."""
        self._emit(PlainText("".join(self._raw)))
        self._state, self._raw, self._num_again = _State.TEXT, [], 0
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
        kept = num_begun(raw, CLOSE)
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


def joined(events: Sequence[CallEvent]) -> list[CallEvent]:
    """Return events with neighbouring pieces of the same text joined, and without empty texts."""
    found: list[CallEvent] = []
    texts: list[str] = []
    for event, following in zip_longest(events, events[1:]):
        if isinstance(event, (PlainText, ArgumentText)):
            texts.append(event.text)
            if type(following) is type(event):
                continue
            event, texts = replace(event, text="".join(texts)), []
            if not event.text:
                continue
        found.append(event)
    return found


def _loaded(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


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
