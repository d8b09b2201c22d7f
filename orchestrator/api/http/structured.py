"""The form of a completion that a request asks for, as a grammar: `response_format`, `structured_outputs`."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import JSON_OBJECT, choice_grammar, json_schema_grammar, regex_grammar
from orchestrator.api.http.fields import ResponseFormat, StructuredOutputs
from orchestrator.api.http.models import OpenAIRequest

MAX_GBNF = 2**14
"""Upper bound of the characters of a grammar in GBNF: they are converted in about 20 ms."""

MAX_GBNF_RULES = 256
"""Upper bound of its rules: the time to convert them grows with their square."""

# Attributes of `StructuredOutputs` of which one is given, with their names in bodies.
_KINDS = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}

_GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
"""The rule that every grammar in GBNF has; no line of one in Lark begins like this."""
_WIDE_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def grammar_of(body: OpenAIRequest) -> tuple[str, str]:
    """Return the grammar of the completions of a body and the field that asks for it; "" for any text."""
    form, outputs = body.response_format, body.structured_outputs
    field = "" if form is None or form.type == "text" else "response_format"
    if outputs is not None:
        if form is not None and field:
            got = f"{form.type} with structured_outputs"
            raise InvalidArgumentError("response_format", got, "one of the two fields")
        field = "structured_outputs"
    if field and body.ignore_eos:
        got = f"true with {field}"
        raise InvalidArgumentError("ignore_eos", got, f"false with {field}, which says where the text ends")
    if outputs is not None:
        return _of_outputs(outputs), field
    return "" if form is None else _of_format(form), field


def _of_format(asked: ResponseFormat) -> str:
    given = asked.json_schema
    field = "response_format.json_schema"
    if asked.type == "json_schema":
        if given is None:
            raise InvalidArgumentError(field, "nothing", "a value; it is required with type json_schema")
        return json_schema_grammar(given.json_schema, f"{field}.schema")
    if given is not None:
        raise InvalidArgumentError(field, f"a schema with type {asked.type}", "no value, or type json_schema")
    return "" if asked.type == "text" else json_schema_grammar(JSON_OBJECT)


def _of_outputs(asked: StructuredOutputs) -> str:
    names = [name for name in _KINDS if name in asked.model_fields_set]
    if "json_object" in names and not asked.json_object:
        names.remove("json_object")
    kinds = [_KINDS[name] for name in names]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of its fields"
        raise InvalidArgumentError("structured_outputs", got, f"exactly one of {', '.join(_KINDS.values())}")
    field = f"structured_outputs.{kinds[0]}"
    match names[0]:
        case "json_schema":
            return json_schema_grammar(_decoded(asked.json_schema, field), field)
        case "regex":
            return regex_grammar(asked.regex, field)
        case "choice":
            return choice_grammar(asked.choice, field)
        case "grammar":
            return _lark(asked.grammar, field)
        case _:
            return json_schema_grammar(JSON_OBJECT)


def _decoded(schema: Any, field: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema)
    except ValueError as error:
        raise InvalidArgumentError(field, f"malformed JSON ({error})", "a JSON schema") from None


def _lark(grammar: str, field: str) -> str:
    if not grammar.strip():
        raise InvalidArgumentError(field, grammar, "a grammar")
    if _GBNF.search(grammar) is None:
        return grammar
    for got, limit, noun in (
        (len(grammar), MAX_GBNF, "characters"),
        (grammar.count("::="), MAX_GBNF_RULES, "rules"),
    ):
        if got > limit:
            raise InvalidArgumentError(field, f"{got} {noun} of GBNF", f"at most {limit}")
    from llguidance.gbnf_to_lark import gbnf_to_lark  # only these requests need it

    try:
        return gbnf_to_lark(_WIDE_ESCAPE.sub(_character, grammar))
    except Exception as error:  # of several kinds, Exception itself among them
        raise InvalidArgumentError(field, f"GBNF that is wrong ({error})", "GBNF or Lark") from None


def _character(escape: re.Match[str]) -> str:
    r"""Return the character of an escape `\u` or `\U`, which llguidance's converter writes wrongly."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else 0
    if not digits or code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return escape.group()
    return chr(code) if code > 0x7F else f"\\x{code:02x}"
