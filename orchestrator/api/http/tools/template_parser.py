"""Parser of tool calls by a model's own response template, which transformers reads.

It is for forms that `CallParser` does not know. transformers tells of a call once it is read to its end, so
its arguments come in one piece. Of a call that breaks off, its name and the parameters that were read are
reported, as arguments without their last brace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from orchestrator.api.http.tools.parser import (
    MIN_BEGUN,
    ArgumentText,
    CallBegun,
    CallEnded,
    CallEvent,
    PlainText,
    joined,
)

_CALLS = "tool_calls"
_WORD = re.compile(r"[A-Za-z0-9_.\-]+")
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What transformers raises for a call: also for deep nesting, groups of a pattern that did not match, and
schemas that are none, which are not checked unless a call is forced."""


class TemplateParser:
    """Finds the tool calls in one completion by a response template, see `CallParser` and `ChatFormat`.

    By `tools`, in OpenAI's form, texts of arguments become values of the types in their schemas. The rendered
    `prompt` may begin the message.
    """

    def __init__(
        self,
        template: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]],
        new_id: Callable[[int], str],
        *,
        prompt: str = "",
        max_calls: int | None = None,
    ) -> None:
        loaded = load_response_template(dict(template))
        self._fields, parser = loaded.fields, partial(ResponseParser, loaded, tools=[*map(dict, tools)])
        try:
            self._parser: Any = parser(prefix=_begun(loaded, prompt))
        except _MALFORMED:  # an earlier call, where results do not begin another message
            self._parser = parser(prefix="")
        self._names = {tool["function"]["name"] for tool in tools}
        self._new_id, self._max_calls = new_id, max_calls
        self._held = ""  # read, and not known yet to be text
        self._is_broken = False  # after a call that is none, all is text
        self._in_call = False
        self._num_whole = 0
        self.num_calls = 0

    @property
    def is_whole(self) -> bool:
        return 0 < self.num_calls == self._num_whole

    def push(self, text: str) -> list[CallEvent]:
        if self._is_broken:
            return joined(self._text(text))
        found: list[CallEvent] = []
        # By character: what a failing call leaves is then the same for every split of the text.
        for position, char in enumerate(text):
            self._held += char
            try:
                events = self._parser.feed(char)
            except _MALFORMED:  # the call that ends here
                self._is_broken = True
                found += self._text(self._held + text[position + 1 :])
                break
            found += self._converted(events)
        return joined(found)

    def finish(self) -> list[CallEvent]:
        if self._is_broken:
            return []
        is_in_call = self._in_call
        if not is_in_call and len(self._held.strip()) >= MIN_BEGUN:
            return []
        try:
            ended = self._parser.finalize()[1]
        except _MALFORMED:
            return self._named_call() if is_in_call else self._text(self._held)
        if is_in_call and not self._is_closed():
            return self._cut_call(ended)
        return joined(self._converted(ended))

    def _is_closed(self) -> bool:
        """Return whether a call ends with the text, where transformers waits for a longer end."""
        close = self._fields[_CALLS].close_re
        if close is None or close.fullmatch("") is not None:
            return True
        found = close.search(self._held)
        return found is not None and bool(found.group())

    def _cut_call(self, ended: Sequence[Mapping[str, Any]]) -> list[CallEvent]:
        """Report a call in which the completion ends, with the arguments that were read."""
        values = (event["value"] for event in ended if event["type"] == "region_close")
        known = [call for value in values for call in self._calls(value) if call is not None]
        if not known:
            return self._named_call()
        name, arguments = known[-1]
        return self._events(name, "" if arguments == "{}" else arguments[:-1], is_whole=False)

    def _named_call(self) -> list[CallEvent]:
        """Report a call of which only the name can be read, if it is clear."""
        named = self._names.intersection(_WORD.findall(self._held))
        return self._events(named.pop(), "", is_whole=False) if len(named) == 1 else []

    def _calls(self, value: Any) -> list[tuple[str, str] | None]:
        return [_call(one, self._names) for one in (value if isinstance(value, list) else [value])]

    def _text(self, text: str) -> list[CallEvent]:
        """Return text of the message; what comes after a call is dropped."""
        return [] if self.num_calls else [PlainText(text)]

    def _converted(self, events: Sequence[Mapping[str, Any]]) -> list[CallEvent]:
        return [found for event in events for found in self._of(event)]

    def _of(self, event: Mapping[str, Any]) -> list[CallEvent]:
        name, kind = event["field"], event["type"]
        if name != _CALLS:
            field = self._fields[name]
            if kind == "region_chunk":
                text = event["text"]
                self._held = self._held[self._held.find(text) + len(text) :]
                return self._text(text)
            # Thinking is sent as it is sent without tools: between its tags.
            tags = field.open_literals if kind == "region_open" else field.close_literals
            return self._text(tags[0]) if tags and field.open_re is not None else []
        self._in_call = kind != "region_close"
        if kind != "region_close":
            return []
        value, held = event["value"], self._held
        self._held = ""
        calls = self._calls(value)
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return self._text(held)
        return [found for call in known for found in self._events(*call)]

    def _events(self, name: str, arguments: str, *, is_whole: bool = True) -> list[CallEvent]:
        index = self.num_calls
        if index == self._max_calls:
            return []
        self.num_calls += 1
        self._num_whole += is_whole
        begun = CallBegun(index, self._new_id(index), name)
        text = [ArgumentText(index, arguments)] if arguments else []
        return [begun, *text, CallEnded(index, is_whole=is_whole)]


def _begun(template: ResponseTemplate, prompt: str) -> str:
    """Return the prompt as far as it tells where the message begins.

    The parser would hold whitespace at its end back, and return it as text of the message.
    """
    if template.start_anchor_re.search(prompt) is None:
        return ""
    begun: str = template.truncate_past_last_anchor(prompt)
    return prompt[: len(prompt) - len(begun) + len(begun.rstrip())]


def _call(value: Any, names: set[str]) -> tuple[str, str] | None:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments") or {}
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except _MALFORMED:
        return None
