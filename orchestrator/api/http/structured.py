"""The form of a completion that a request asks for, as a grammar: `response_format`, `structured_outputs`."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.texts import JSON_OBJECT, choice_grammar, json_schema_grammar, regex_grammar
from orchestrator.api.http.fields import ResponseFormat, StructuredOutputs
from orchestrator.api.http.models import OpenAIRequest

# Attributes of `StructuredOutputs` of which one is given, with their names in bodies.
_KINDS = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
}


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
