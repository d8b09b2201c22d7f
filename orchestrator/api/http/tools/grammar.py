"""The grammar of a message that consists of tool calls, in the form of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gammaray.grammar.texts import json_rule, literal
from orchestrator.api.http.tools.formats import CLOSE, OPEN, CallFamily, CallFormat

MAX_CALLS = 16
"""Upper bound of the calls in one message whose calls a grammar enforces: small models know no end."""

ARGUMENTS_RULE = re.compile(r"arguments_(\d+): ")
"""Beginning of the rule for a tool's arguments, with the tool's number."""


def call_grammar(
    form: CallFormat,
    tools: Sequence[tuple[str, Mapping[str, Any], str]],
    *,
    is_parallel: bool,
    answer: str = "",
    is_thinking: bool = False,
) -> str:
    """Return the grammar of at least one call, or of an answer by the right side `answer` unless it is empty.

    Args:
        tools: Name, schema of the arguments, and the schema's field, for errors, of each that may be called.
        is_parallel: Whether there may be several calls; never with Llama, whose templates refuse several.
        is_thinking: Whether the prompt ends in a thinking part, which the message continues.
    """
    family = form.family
    key = "parameters" if family is CallFamily.LLAMA else "arguments"
    heads = [literal(f'{{"name": "{name}", "{key}": ') for name, _, _ in tools]
    lines = ["call: " + " | ".join(f'{head} arguments_{n} "}}"' for n, head in enumerate(heads))]
    lines += [f"arguments_{n}: {json_rule(schema, field)}" for n, (_, schema, field) in enumerate(tools)]
    lines.append(f"calls: {_calls(form, is_parallel=is_parallel)}")
    if family is CallFamily.HERMES:
        lines.append(f'marked: {_symbol(form, OPEN[family])} "\\n" call "\\n" {_symbol(form, CLOSE)}')
    lines += ["message: calls | answer", f"answer: {answer}"] if answer else ["message: calls"]
    if not form.can_think or form.marker_in_prompt:
        return "\n".join(["start: message", *lines])
    thought = ["thought: TEXT </think> /[ \\n]{0,4}/", "TEXT: /(.|\\n)*/"]
    start = "thought message" if is_thinking else "(<think> thought)? message"
    return "\n".join([f"start: {start}", *lines, *thought])


def _calls(form: CallFormat, *, is_parallel: bool) -> str:
    more = MAX_CALLS - 1
    if form.family is CallFamily.LLAMA:
        return "call"
    if form.family is CallFamily.HERMES:
        return f'marked ("\\n" marked){{0,{more}}}' if is_parallel else "marked"
    calls = f'call (", " call){{0,{more}}}' if is_parallel else "call"
    marker = "" if form.marker_in_prompt else f"{_symbol(form, OPEN[form.family])} "
    return f'{marker}/ ?/ "[" {calls} "]"'


def _symbol(form: CallFormat, marker: str) -> str:
    """Return a marker as llguidance knows it: added tokens like <this> are tokens, all else is text."""
    is_token = marker in form.chat.added_tokens and marker[0] == "<" and marker[-1] == ">"
    return marker if is_token else literal(marker)
