"""Parser of tool calls by a model's own response template, which transformers reads.

It is for forms that `CallParser` does not know. transformers tells of a call once it is read to its end, so
its arguments come in one piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from orchestrator.api.http.tools.parser import (
    ArgumentText,
    CallBegun,
    CallEnded,
    CallEvent,
    PlainText,
)

__all__ = ["TemplateParser"]

_CALLS = "tool_calls"


class TemplateParser:
    """Finds the tool calls in one completion, see `CallParser`.

    Args:
        template: The response template, see `ChatFormat`.
        tools: The tools in OpenAI's form: texts of arguments become values of the types in their schemas.
        new_id: Returns the id of the call with this index.
        prompt: The rendered prompt, which may begin the message.
        max_calls: Further calls are dropped; None: no bound.

    Attributes:
        num_calls: Calls so far.
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
        self._fields, prefix = loaded.fields, _begun(loaded, prompt)
        self._parser: Any = ResponseParser(loaded, prefix=prefix, tools=[dict(tool) for tool in tools])
        self._names = {tool["function"]["name"] for tool in tools}
        self._new_id, self._max_calls = new_id, max_calls
        self._held = ""  # read, and not known yet to be text
        self._is_broken = False  # after a call that is none, all is text
        self.num_calls = 0

    def push(self, text: str) -> list[CallEvent]:
        """Add the next piece of the completion; return what it completes."""
        found: list[CallEvent] = []
        for position, char in enumerate(text):
            if self._is_broken:
                found.append(PlainText(text[position:]))
                break
            self._held += char
            # By character: what a failing call leaves is then the same for every split of the text.
            found += self._read(partial(self._parser.feed, char))
        return _joined(found)

    def finish(self) -> list[CallEvent]:
        """Return what is left at the end of the completion."""
        if self._is_broken:
            return []
        return _joined(self._read(lambda: self._parser.finalize()[1]))

    def _read(self, feed: Callable[[], Sequence[Mapping[str, Any]]]) -> list[CallEvent]:
        try:
            events = feed()
        except ValueError:  # the call that ends here is malformed
            self._is_broken = True
            return [PlainText(self._held)]
        return [found for event in events for found in self._converted(event)]

    def _converted(self, event: Mapping[str, Any]) -> list[CallEvent]:
        name, kind = event["field"], event["type"]
        if name != _CALLS:
            field = self._fields[name]
            if kind == "region_chunk":
                text = event["text"]
                self._held = self._held[self._held.find(text) + len(text) :]
                return [PlainText(text)]
            # Thinking is sent as it is sent without tools: between its tags.
            tags = field.open_literals if kind == "region_open" else field.close_literals
            return [PlainText(tags[0])] if tags and field.open_re is not None else []
        if kind != "region_close":
            return []
        value, held = event["value"], self._held
        self._held = ""
        calls = [_call(one, self._names) for one in (value if isinstance(value, list) else [value])]
        known = [call for call in calls if call is not None]
        if len(known) < len(calls):
            return [PlainText(held)]
        return [found for call in known for found in self._events(*call)]

    def _events(self, name: str, arguments: str) -> list[CallEvent]:
        index = self.num_calls
        if index == self._max_calls:
            return []
        self.num_calls += 1
        begun = CallBegun(index, self._new_id(index), name)
        return [begun, ArgumentText(index, arguments), CallEnded(index, is_whole=True)]


def _begun(template: ResponseTemplate, prompt: str) -> str:
    """Return the prompt as far as it tells where the message begins.

    The parser would hold whitespace at its end back, and return it as text of the message.
    """
    if template.start_anchor_re.search(prompt) is None:
        return ""
    begun: str = template.truncate_past_last_anchor(prompt)
    return prompt[: len(prompt) - len(begun) + len(begun.rstrip())]


def _call(value: Any, names: set[str]) -> tuple[str, str] | None:
    """Return name and arguments of a call, None if it is none."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        return None
    name, arguments = function.get("name"), function.get("arguments") or {}
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None


def _joined(events: list[CallEvent]) -> list[CallEvent]:
    """Return events with neighbouring texts joined."""
    joined: list[CallEvent] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, PlainText):
            texts.append(event.text)
            continue
        if texts:
            joined.append(PlainText("".join(texts)))
            texts = []
        joined.append(event)
    return [*joined, PlainText("".join(texts))] if "".join(texts) else joined
