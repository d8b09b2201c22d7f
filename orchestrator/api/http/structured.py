"""The form of a completion that a request asks for, as a grammar: `response_format`, `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import JSON_OBJECT, choice_grammar, json_rule, json_schema_grammar, regex_grammar
from orchestrator.api.http.fields import ResponseFormat, StructuredOutputs
from orchestrator.api.http.models import OpenAIRequest

# Attributes of `StructuredOutputs` of which one is given, with their names in bodies.
_KINDS = {"json_schema": "json"} | {name: name for name in ("regex", "choice", "grammar", "json_object")}


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
    given, field = asked.json_schema, "response_format.json_schema"
    schema = None if given is None else given.json_schema
    rule = format_rule(asked.type, schema, f"{field}.schema", {field: given is not None})
    return f"start: {rule}" if rule else ""


def format_rule(kind: str, schema: Any, field: str, given: Mapping[str, bool]) -> str:
    """Return the right side of the rule for texts of a format; empty for any text.

    `schema` is that of json_schema, `field` its name for errors. `given` is whether there are the fields that
    json_schema requires and the other formats do not have.
    """
    for name, is_given in given.items():
        if kind == "json_schema" and not is_given:
            raise InvalidArgumentError(name, "nothing", "a value; it is required with type json_schema")
        if kind != "json_schema" and is_given:
            raise InvalidArgumentError(name, f"a value with type {kind}", "no value, or type json_schema")
    if kind == "text":
        return ""
    return json_rule(schema, field) if kind == "json_schema" else json_rule(JSON_OBJECT)


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
            if not asked.grammar.strip():
                raise InvalidArgumentError(field, asked.grammar, "a grammar")
            return asked.grammar
        case _:
            return json_schema_grammar(JSON_OBJECT)


def _decoded(schema: Any, field: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return from_json(schema)
    except ValueError as error:
        raise InvalidArgumentError(field, f"malformed JSON ({error})", "a JSON schema") from None
