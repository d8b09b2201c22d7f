"""Requests from plain Python arguments, structured output among them, and what its text stands for."""

import json
from dataclasses import dataclass, replace

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError, field_validator

from gammaray import (
    ADAPTIVE,
    AsyncClient,
    DrafterKind,
    FinishReason,
    GammaPolicy,
    GenerateOptions,
    GenerationRequest,
    InvalidArgumentError,
    SamplingParams,
    VerificationMethod,
)
from gammaray.client.request import build_request
from gammaray.errors import IncompleteOutputError
from gammaray.grammar.texts import choice_grammar, json_schema_grammar, regex_grammar
from gammaray.types import Chunk
from tests.support.own_process import run_code
from tests.support.sdk_helpers import ScriptedService, answer, last, piece, refuse, serve


def test_request_without_options_has_the_defaults_of_the_types():
    assert build_request("Hi") == GenerationRequest("Hi")


def test_request_every_option_sets_its_field():
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "min_tokens": 2, "seed": 17}
    sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    sampling |= {"logit_bias": {5: -1.0}, "allowed_token_ids": [1, 2], "banned_token_ids": [3]}
    sampling |= {"sample_index": 4, "grammar": ""}  # tested below; it does not go with ignore_eos
    same = {"max_tokens": 5, "ignore_eos": True, "store": True, "model": "demo"}
    same |= {"session_id": "mine", "turn": 2, "cache_salt": "apart"}
    others = {  # option: given, field, expected
        "stop": ("end", "stop", ("end",)),
        "stop_token_ids": ([9], "stop_token_ids", (9,)),
        "logprobs": (3, "num_top_logprobs", 3),
        "prompt_logprobs": (4, "num_prompt_logprobs", 4),
        "verification": ("rejection", "verification", VerificationMethod.REJECTION),
        "gamma": (6, "gamma", GammaPolicy(6)),
        "drafter": ("none", "drafter", DrafterKind.NONE),
        "prediction": ([5, 6], "prediction", (5, 6)),
    }
    options = {**sampling, **same, **{name: given for name, (given, _, _) in others.items()}}
    others_tested = {"json_schema", "regex", "choice", "receipt"}  # a receipt goes with one method only
    assert options.keys() == GenerateOptions.__annotations__.keys() - others_tested
    expected = {field: value for _, field, value in others.values()}
    assert build_request([1, 2], **options) == GenerationRequest(
        (1, 2), sampling=SamplingParams.of(sampling), **same, **expected
    )


def test_request_gamma_of_every_form_is_a_policy():
    own = GammaPolicy(max_gamma=3)
    for gamma, policy in (("adaptive", ADAPTIVE), (0, GammaPolicy(0)), (64, GammaPolicy(64)), (own, own)):
        assert build_request("Hi", gamma=gamma).gamma == policy


def test_request_wrong_prompt_is_named(subtests):
    for prompt in ("", [], b"bytes", None, [-1], [2**32], ["a"], [True], "a\ud800b", "x" * (2**20 + 1)):
        with subtests.test(ascii(prompt)[:20]):
            with pytest.raises(InvalidArgumentError, match=r"^prompt: got"):
                build_request(prompt)


def test_request_unknown_option_raises_and_lists_the_known():
    with pytest.raises(TypeError, match=r"no option named temprature; known options: .*temperature"):
        build_request("Hi", temprature=1)


def test_request_whole_request_is_checked_and_takes_no_options():
    with pytest.raises(InvalidArgumentError):
        build_request(GenerationRequest("Hi", max_tokens=0))
    with pytest.raises(TypeError, match="max_tokens"):
        build_request(GenerationRequest("Hi"), max_tokens=3)


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


WRONG = {
    **{"temperature": [float("nan")], "max_tokens": [1.5], "gamma": [True, "fast"], "model": [3]},
    **{"verification": ["hope"], "drafter": ["guess"], "ignore_eos": ["yes"], "session_id": ["a b"]},
    "stop": [[""], [1], ["x"] * 17, "\ud800"],
    **{"stop_token_ids": [[-1], 3], "banned_token_ids": [["a"]], "logit_bias": [[1]], "store": [0]},
    "cache_salt": ["x" * 65, "\ud800"],
    "prediction": [None, "\ud800", [1] * (2**16 + 1), [-1]],
    "json_schema": ["{}", 5, [SCHEMA], Person(name="a", age=1), type(lambda: 0), {"enum": ["x" * 2**18]}],
    **{"regex": [""], "choice": [[]], "grammar": [5, "x" * (2**18 + 1)]},
}
"""Option -> values that are refused by its name."""


def test_wrong_option_is_named(subtests):
    for options, field in [
        *(({name: value}, name) for name, values in WRONG.items() for value in values),
        ({"logit_bias": {1: 101.0}}, "logit_bias[1]"),
        ({"logprobs": 21}, "num_top_logprobs"),
        ({"store": False, "session_id": "mine"}, "store"),
        ({"json_schema": SCHEMA, "regex": "a"}, "json_schema"),
        ({"regex": "a", "grammar": "start: /a/"}, "regex"),
    ]:
        with subtests.test(ascii((options, field))[:80]):
            with pytest.raises(InvalidArgumentError) as caught:
                build_request("Hi", **options)
            assert caught.value.field == field
            assert caught.value.allowed
            str(caught.value).encode()


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
    run_code(code)
