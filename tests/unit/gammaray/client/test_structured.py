"""Structured output in the SDK: the options become a grammar, and `parsed` is the object of the text."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from gammaray import AsyncClient, FinishReason, GenerationRequest, SamplingParams
from gammaray.client.request import build_request
from gammaray.errors import IncompleteOutputError, InvalidArgumentError
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar
from gammaray.types import Chunk
from tests.support.sdk_helpers import ScriptedService, answer, last, piece, refuse, serve


class Person(BaseModel):
    name: str
    age: int

    @field_validator("age")
    @classmethod
    def _check_age(cls, age: int) -> int:
        if age > 150:
            raise ValueError("too old")
        return age


@dataclass
class Place:
    name: str


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("options", "grammar"),
    [
        ({}, ""),
        ({"json_schema": None, "regex": None, "choice": None, "grammar": None}, ""),
        ({"json_schema": SCHEMA}, json_schema_grammar(SCHEMA)),
        ({"json_schema": True}, json_schema_grammar(True)),
        ({"json_schema": Person}, json_schema_grammar(Person.model_json_schema())),
        ({"json_schema": Place}, json_schema_grammar(TypeAdapter(Place).json_schema())),
        ({"json_schema": list[Person]}, json_schema_grammar(TypeAdapter(list[Person]).json_schema())),
        ({"regex": r"\d+"}, regex_grammar(r"\d+")),
        ({"choice": ("a", "b")}, choice_grammar(["a", "b"])),
        ({"grammar": "start: /a+/"}, "start: /a+/"),
    ],
    ids=str,
)
def test_options_become_the_grammar(options, grammar):
    expected = GenerationRequest("Hi", sampling=SamplingParams(grammar=grammar), max_tokens=5)
    assert build_request("Hi", max_tokens=5, **options) == expected


def test_wrong_option_is_named(subtests):
    for options, field in [
        ({"json_schema": SCHEMA, "regex": "a"}, "json_schema"),
        ({"regex": "a", "grammar": "start: /a/"}, "regex"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"json_schema": 5}, "json_schema"),
        ({"json_schema": [SCHEMA]}, "json_schema"),
        ({"json_schema": Person(name="a", age=1)}, "json_schema"),
        ({"json_schema": type(lambda: 0)}, "json_schema"),
        ({"json_schema": {"enum": ["x" * 2**18]}}, "json_schema"),
        ({"regex": ""}, "regex"),
        ({"choice": []}, "choice"),
        ({"grammar": 5}, "grammar"),
        ({"grammar": "x" * (2**18 + 1)}, "grammar"),
    ]:
        with subtests.test(str((options, field))[:80]):
            with pytest.raises(InvalidArgumentError) as caught:
                build_request("Hi", **options)
            assert caught.value.field == field
            assert caught.value.allowed


def cut(text: str, reason: FinishReason = FinishReason.LENGTH) -> Chunk:
    return replace(last(text), finish_reason=reason)


TEXT = '{"name": "Ada", "age": 36}'


async def complete(*chunks: Chunk, **options):
    async with serve(ScriptedService(answer(*chunks))) as address, AsyncClient(address) as client:
        return await client.complete("Hi", **options)


@pytest.mark.parametrize(
    ("form", "text", "value"),
    [
        (Person, TEXT, Person(name="Ada", age=36)),
        (SCHEMA, '{"name": "é"}', {"name": "é"}),
        (Place, '{"name": "x"}', Place("x")),
        (list[Person], f"[{TEXT}]", [Person(name="Ada", age=36)]),
        ({"type": "null"}, "null", None),
        (int, "12", 12),
    ],
    ids=str,
)
async def test_parsed_is_what_the_text_stands_for(form, text, value):
    completion = await complete(piece(text[:1]), last(text[1:]), json_schema=form)
    assert (completion.text, completion.parsed) == (text, value)


@pytest.mark.parametrize("options", [{}, {"regex": "[0-9]+"}, {"choice": ["12"]}, {"grammar": "start: /1/"}])
async def test_parsed_is_none_without_a_schema(options):
    assert (await complete(last("12"), **options)).parsed is None


@pytest.mark.parametrize(
    ("chunk", "form"),
    [
        (cut('{"name": "A'), Person),
        (cut('{"name": "A'), SCHEMA),
        (cut("12"), int),  # it may have been the beginning of 123
        (cut(TEXT, FinishReason.CANCELLED), Person),
        (last('{"name": "A'), SCHEMA),  # cut before a stop string
        (last(""), Person),
    ],
    ids=str,
)
async def test_parsed_of_a_cut_text_raises_and_the_text_stays(chunk, form):
    completion = await complete(chunk, json_schema=form)
    assert completion.text == chunk.text
    with pytest.raises(IncompleteOutputError, match="before its JSON was complete") as caught:
        completion.parsed  # noqa: B018  # a property
    assert caught.value.text == chunk.text
    assert caught.value.finish_reason == chunk.finish_reason.value


async def test_own_validators_of_a_model_raise_their_error():
    completion = await complete(last('{"name": "Ada", "age": 200}'), json_schema=Person)
    with pytest.raises(ValidationError, match="too old"):
        completion.parsed  # noqa: B018


REFUSAL = InvalidArgumentError("grammar", 'Unimplemented keys: ["not"]', "a grammar that compiles")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"json_schema": {"type": "string"}}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"choice": ["a"]}, "choice"),
        ({"grammar": "start: x"}, "grammar"),
    ],
)
@pytest.mark.parametrize("chunks", [(), (piece("a"),)], ids=["at once", "later"])
async def test_refusal_of_the_server_names_the_option(options, field, chunks):
    async with serve(ScriptedService(refuse(REFUSAL, *chunks))) as address, AsyncClient(address) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.complete("Hi", **options)
    assert (caught.value.field, caught.value.got) == (field, REFUSAL.got)


def test_schema_without_types_needs_no_pydantic():
    code = (
        "import sys; from gammaray.client.request import build_request;"
        f"build_request('Hi', json_schema={json.dumps(SCHEMA)});"
        "assert not {'pydantic', 'llguidance'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
