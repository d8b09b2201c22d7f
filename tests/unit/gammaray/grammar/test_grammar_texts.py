"""Grammars from schemas, expressions and choices, followed by llguidance with the demo pair's tokenizer."""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import Counter
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from gammaray import InvalidArgumentError
from gammaray.demo_pair import resolve_model
from gammaray.grammar.texts import JSON_OBJECT, MAX_DEPTH, choice_grammar, json_schema_grammar, regex_grammar
from tests.support.schema_helpers import TEXTS, closed, nested, variations, with_values


@cache
def demo() -> tuple[Tokenizer, LLTokenizer]:
    text = (Path(resolve_model("demo")) / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # a grammar allows the text `<|end|>`, not the token
    return tokenizer, LLTokenizer(text)


def compiled(grammar: str) -> LLMatcher:
    matcher = LLMatcher(demo()[1], LLMatcher.grammar_from_lark(grammar), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def refusal(grammar: str) -> str:
    """Return why llguidance refuses a grammar, empty if it does not."""
    return compiled(grammar).get_error()


def follows(grammar: str, *texts: str) -> list[bool]:
    """Return for each text whether it is one of the grammar's, which must be a right one."""
    assert "<[" not in grammar
    matcher = compiled(grammar)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
    found = []
    for text in texts:
        fresh = matcher.deep_copy()
        token_ids = demo()[0].encode(text).ids
        found.append(fresh.try_consume_tokens(token_ids) == len(token_ids) and fresh.is_accepting())
    return found


THOROUGH = settings(max_examples=100)


@THOROUGH
@given(with_values())
def test_schema_grammar_has_the_values_that_match_it(drawn):
    schema, value = drawn
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert follows(json_schema_grammar(schema), text) == [True]


@THOROUGH
@given(with_values())
def test_schema_grammar_has_no_other_values(drawn):
    schema, value = drawn
    validator = Draft202012Validator(closed(schema))
    others = [json.dumps(other) for other in variations(value) if not validator.is_valid(other)]
    assert not any(follows(json_schema_grammar(schema), *others[:50]))


RESTRICTIONS = {
    "not": {"type": "string"},
    "if": {"then": {"required": ["a"]}},
    "uniqueItems": True,
    "contains": {"type": "string"},
    "propertyNames": {"format": "uuid"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "type": "text",
    "maxProperties": 2,
}


INTEGER_A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
A_AND_B = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}


INNER = {"$id": "http://e/x", "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
OVERLAPPING = [
    {"oneOf": [INTEGER_A, A_AND_B]},
    {"oneOf": [{"type": "object", "properties": {"x": one}} for one in (INTEGER_A, A_AND_B)]},
    {"oneOf": [{"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "xy"]},  # any type
    {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{}, {}]},
    {
        "oneOf": [{"$ref": "#/$defs/A~1B"}, {"$ref": "#/$defs/B"}],
        "$defs": {"A~1B": A_AND_B, "B": {"type": "null"}},
    },
    {
        "oneOf": [{"$ref": "http://e/x#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {"A": A_AND_B, "B": {"type": "null"}},
    },
    {"properties": {"p": INNER}, "$defs": {"A": {"type": "string"}, "B": {"type": "null"}}},
]


def test_alternatives_that_may_overlap_are_refused(subtests):
    for schema in OVERLAPPING:
        with subtests.test(str(schema)), pytest.raises(InvalidArgumentError, match="oneOf"):
            json_schema_grammar(schema)


def num_calls(schema):
    """Return how many functions are called to write a schema's grammar."""
    events = Counter()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        json_schema_grammar(schema)
    finally:
        sys.setprofile(None)
    return events["call"] + events["c_call"]


def test_work_for_many_alternatives_is_linear_in_their_number():
    few, many = (
        [
            {"type": "object", "properties": {"k": {"const": n}}, "required": ["k"]}
            for n in map(str, range(count))
        ]
        for count in (20, 200)
    )
    assert num_calls({"oneOf": many}) < 11 * num_calls({"oneOf": few})


def test_restriction_that_cannot_be_followed_is_refused_by_name(subtests):
    for keyword, value in RESTRICTIONS.items():
        properties = {"a": {}, "b": {}, "c": {}} if keyword.endswith("Properties") else {}
        schema = {"properties": {"x.y": {"items": {"properties": properties, keyword: value}}}}
        with subtests.test(keyword):
            assert keyword.removeprefix("min").removeprefix("max") in refusal(json_schema_grammar(schema))


KINDS = [
    {
        "type": "object",
        "properties": {"kind": {"const": kind}, name: {"type": "integer"}},
        "required": ["kind"],
    }
    for kind, name in (("x", "a"), ("y", "b"))
]
PREFIXED = {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False}
FLEXIBLE = {"type": "array", "x-guidance": {"whitespace_flexible": True}}
FOLLOWED = {
    "a part that is not used may have any keyword": (
        {"type": "null", "$defs": {"A": {"not": {}}}},
        ["null"],
        [],
    ),
    "alternatives of different constants": (
        {"oneOf": [{"const": "a"}, {"const": True}]},
        ['"a"', "true"],
        ['"b"'],
    ),
    "alternatives in definitions": (
        *({"oneOf": [{"$ref": "#/definitions/A"}, {"type": "null"}], "definitions": {"A": KINDS[0]}},),
        ['{"kind": "x"}', "null"],
        ['{"kind": "y"}'],
    ),
    "alternatives with a discriminator are closed": (
        *({"oneOf": KINDS}, ['{"kind": "x", "a": 1}', '{"kind": "y", "b": 1}']),
        ['{"kind": "x", "b": 1}', '{"kind": "x", "c": 1}'],
    ),
    "a keyword of older drafts does not change items after a prefix": (PREFIXED, ['[1, "x"]'], ['["x"]']),
    "the style is not for schemas to say": (FLEXIBLE, ["[1, 2]"], ["[1,2]", "[1,  2]"]),
    "the whitespace is that of json.dumps": (
        *(JSON_OBJECT, ['{"a": [1, {}]}']),
        ['{"a":[1, {}]}', '{"a": [1,{}]}', '{ "a": [1, {}]}', '{"a": [1, {}]}\n'],
    ),
    "the largest integers are exact": (
        {"type": "integer", "maximum": 2**63 - 1},
        [str(2**52)],
        [str(2**53 + 1)],
    ),
    "so are the least ones": ({"type": "integer", "minimum": -(2**63)}, [str(-(2**52))], [str(-(2**53) - 1)]),
    "strings have the escapes that they need": (
        *({"type": "string"}, ['"é"', '"\\n"']),
        ['"\\u00e9"', '"\\ud83d"', '"\t"'],
    ),
    "the deepest schema": (nested(MAX_DEPTH), ["[" * MAX_DEPTH + '""' + "]" * MAX_DEPTH], []),
    "dates": ({"type": "string", "format": "date"}, ['"2026-02-28"'], ['"soon"']),
    "addresses": ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2"']),
    "multiples of ten thousand": ({"type": "number", "multipleOf": 10_000}, ["20000"], ["15000"]),
    "multiples of a hundredth": ({"type": "number", "multipleOf": 0.01}, ["1.25"], ["1.255"]),
    "multiples of seven": (
        {"properties": {"multipleOf": {"multipleOf": 7}}, "type": "object"},
        ['{"multipleOf": 14}'],
        ['{"multipleOf": 15}'],
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), FOLLOWED.values(), ids=FOLLOWED)
def test_schema_is_followed(schema, good, bad):
    expected = [True] * len(good) + [False] * len(bad)
    assert follows(json_schema_grammar(schema), *good, *bad) == expected


ANYTHING = [
    *({"uniqueItems": False}, {"minItems": 0}, {"additionalItems": False}, {"unevaluatedItems": True}),
    *({"propertyNames": names} for names in (True, {}, {"type": "string"})),
    *({"minProperties": 0}, {"unevaluatedProperties": {}}, {"minLength": 0}),
    *({"minimum": -(2**63), "maximum": 2**63 - 1}, {"maximum": 2**64 - 1}),
    *({"format": kind} for kind in ("password", "", None, ["date"], {})),
    {"default": 1, "examples": [1], "deprecated": True, "$comment": "c"},
    {"readOnly": True, "writeOnly": True, "contentEncoding": "base64", "contentSchema": {"not": {}}},
    {"discriminator": {"propertyName": "a"}, "nullable": True, "x-own": 1},
]


def test_keywords_that_restrict_nothing_are_accepted(subtests):
    for schema in ANYTHING:
        with subtests.test(str(schema)[:80]):
            assert follows(json_schema_grammar(schema), "1", "-12") == [True, True]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"$ref": "http://localhost/schema"}, "http://localhost/schema"),
        ({"type": "string", "pattern": "a(b"}, "unclosed group"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
        (False, "Unsatisfiable"),
        ({"$ref": "#"}, "NoExtension"),
        ({"allOf": [{"$ref": "#"}]}, "NoExtension"),
    ],
    ids=str,
)
def test_schema_without_a_text_or_support_is_refused(schema, reason):
    assert reason in refusal(json_schema_grammar(schema))


CIRCLE: dict = {"type": "object"}
CIRCLE["properties"] = {"again": CIRCLE}


def test_value_that_is_no_schema_is_named(subtests):
    cases = [
        *([], None, "object", 5, {"const": {1, 2}}, {"const": float("nan")}, {"maximum": float("inf")}),
        *(nested(MAX_DEPTH + 1), nested(100_000), CIRCLE),
        *(
            {"const": 2**53 + 1},
            {"enum": [1, [{"a": -(2**53) - 1}]]},
            {"const": 1e300},
            {"minimum": 2**53 + 1},
            {"$ref": "#/components/a", "components": {"a": {"const": 2**53 + 1}}},
            {"type": "object", "minProperties": 2},
        ),
    ]
    for number, schema in enumerate(cases):
        with subtests.test(number=number):
            with pytest.raises(InvalidArgumentError) as caught:
                json_schema_grammar(schema, "mine")
            assert caught.value.field.split(".")[0] == "mine"
            assert caught.value.allowed


OPEN = [
    {"type": "object"},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}},
    {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    {"properties": {"a": {}, "b": {}}, "anyOf": [{"properties": {"a": {"const": 1}}}, {"required": ["b"]}]},
    {"$ref": "#/$defs/A", "properties": {"b": {}}, "$defs": {"A": {"properties": {"a": {}}}}},
]
CLOSED = [
    {"type": "object", "properties": {"a": {}}},
    {"$ref": "#/$defs/A", "description": "d", "$defs": {"A": {"type": "object", "properties": {"a": {}}}}},
    {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "null"}]},
    {"allOf": [{"type": "object", "properties": {"a": {}}}]},
    {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
]


def test_objects_that_list_their_properties_have_no_others(subtests):
    for schema, is_open in [*((schema, True) for schema in OPEN), *((schema, False) for schema in CLOSED)]:
        with subtests.test(str((schema, is_open))[:80]):
            assert follows(json_schema_grammar(schema), '{"a": 1, "b": 2}', '{"a": 1}') in (
                [[True, True], [True, False]] if is_open else [[False, True]]
            )


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    kind: Literal["point"]
    x: int = Field(ge=0)


class Circle(BaseModel):
    kind: Literal["circle"]
    around: Point
    colour: Colour | None = None


class Picture(BaseModel):
    name: str = Field(description="Its name.", examples=["a"], max_length=20)
    drawn: datetime.date
    shapes: list[Annotated[Point | Circle, Field(discriminator="kind")]]
    sizes: dict[str, tuple[int, float]]
    inner: Picture | None = None


def test_pydantic_schemas_have_the_texts_of_their_models():
    point = Point(kind="point", x=3)
    shapes = [point, Circle(kind="circle", around=point, colour=Colour.RED)]
    fields = {"name": "n", "drawn": "2026-01-02", "sizes": {"k": (1, 0.5)}}
    picture = Picture(shapes=shapes, inner=Picture(shapes=[], **fields), **fields)
    text = json.dumps(json.loads(picture.model_dump_json()))
    wrong = text.replace('"red"', '"green"'), text.replace('"point"', '"circle"'), text.replace("3", "-3")
    followed = follows(json_schema_grammar(Picture.model_json_schema()), text, *wrong)
    assert followed == [True, False, False, False]


def test_regex_grammar_matches_whole_texts(subtests):
    for pattern, good, bad in [
        (r"\\/", "\\/", "/"),
        ("[/]+", "//", "x"),
        ("a\\\nb", "a\nb", "a\\nb"),
        (r"a\nb", "a\nb", "anb"),
        ("a\rb\t", "a\rb\t", "ab"),
        ("<[a-z]+>", "<ab>", "ab"),
        (r"\<[a-z]+\>", "<ab>", "ab"),
        (r"\\<[a-z]", "\\<a", "<a"),
        (r"[<\[]", "<", ""),
        ("(?P<word>a)<[1]>", "a<1>", "a"),
        (r"^\d{2}$", "12", "123"),
        ("a|ab", "ab", "b"),
        ("(?i)abc", "aBC", "ab"),
        ("é+😀", "éé😀", "e"),
        ("\"'#", "\"'#", ""),
        (".*", "a</x>", "a\nb"),
        (r"\p{L}+", "ßé", "1"),
        ("\x00\x7f", "\x00\x7f", ""),
    ]:
        with subtests.test(str((pattern, good, bad))[:80]):
            assert follows(regex_grammar(pattern), good, bad, f"{good}\n!") == [True, False, False]


# Parts of expressions, with a text that each matches.
PARTS = st.sampled_from(
    [("/", "/"), (r"\/", "/"), ("<[a]", "<a"), (r"[^/<\[]", "x"), (r"\\", "\\"), ("\n", "\n")]
)


@given(st.lists(PARTS | TEXTS.map(lambda text: (re.escape(text), text)), min_size=1))
def test_regex_grammar_has_the_texts_of_its_parts_in_order(parts):
    pattern, text = map("".join, zip(*parts, strict=True))
    assume(pattern)
    assert follows(regex_grammar(pattern), text, f"{text}x") == [True, False]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a", "unclosed group"),
        ("a(?=b)", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bword", "lookarounds"),
    ],
)
def test_unsupported_regex_is_refused_with_its_reason(pattern, reason):
    assert reason in refusal(regex_grammar(pattern))


@pytest.mark.parametrize("pattern", ["", None, 5, ["a"], "a\\", "a\\\\\\", "\ud800"])
def test_value_that_is_no_regex_is_named(pattern):
    with pytest.raises(InvalidArgumentError, match=r"^mine: got"):
        regex_grammar(pattern, "mine")


@example(
    ['"', "\\", "\n", "\x00", "\x7f", "\u2028", "😀", "<[1]>", "//", "|", '" | "b', "%json {}", "é"], "b"
)
@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=5), TEXTS)
def test_choice_grammar_has_exactly_the_choices(choices, other):
    grammar = choice_grammar(choices)
    assert follows(grammar, *choices) == [True] * len(choices)
    assert follows(grammar, other, "".join(choices) + "!") == [other in choices, False]


@pytest.mark.parametrize(
    "choices", [[], "ab", None, {"a"}, [""], ["a", ""], [1], ["a", None], ["\ud800"]], ids=repr
)
def test_value_that_is_no_choice_is_named(choices):
    with pytest.raises(InvalidArgumentError, match=r"^mine: got"):
        choice_grammar(choices, "mine")
