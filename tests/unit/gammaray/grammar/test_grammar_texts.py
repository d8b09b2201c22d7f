"""Grammars from schemas, expressions and choices, followed by llguidance with the demo pair's tokenizer."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gammaray import InvalidArgumentError
from gammaray.demo_pair import resolve_model
from gammaray.grammar.texts import (
    JSON_OBJECT,
    MAX_DEPTH,
    choice_grammar,
    json_schema_grammar,
    regex_grammar,
    without_unicode_escapes,
)
from tests.support.schema_helpers import TEXTS, closed, variations, with_values


@cache
def demo() -> tuple[Tokenizer, LLTokenizer]:
    text = (Path(resolve_model("demo")) / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    tokenizer.encode_special_tokens = True  # a grammar allows the text `<|end|>`, not the token
    return tokenizer, LLTokenizer(text)


@cache
def knows_escapes() -> bool:
    """Return whether llguidance lets texts escape printable characters, as it does from 1.9 on."""
    return not LLMatcher(
        demo()[1], LLMatcher.grammar_from_lark(json_schema_grammar(True)), log_level=0
    ).is_error()


def compiled(grammar: str) -> LLMatcher:
    grammar = grammar if knows_escapes() else without_unicode_escapes(grammar)
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
@given(with_values(), st.booleans())
def test_schema_grammar_has_the_values_that_match_it(drawn, escapes):
    schema, value = drawn
    # Characters of constants and patterns are not written as escapes, except for DEL, which always is.
    text = json.dumps(value, ensure_ascii=escapes and not FIXED.search(str(schema)))
    assert follows(json_schema_grammar(schema), text.replace("\x7f", "\\u007f")) == [True]


FIXED = re.compile("'(const|enum|pattern|properties)'")


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
    "$dynamicRef": "#a",
    "type": "text",
    "pattern": "^(?=a)",
    "minimum": 2**64,
    "const": 2**64,
    "minProperties": 2,
    "maxProperties": 2,
}


def test_restriction_that_cannot_be_followed_is_refused_with_its_place(subtests):
    for keyword in RESTRICTIONS:
        with subtests.test(keyword):
            properties = {"a": {}, "b": {}, "c": {}} if keyword.endswith("Properties") else {}
            inner = {"properties": properties, keyword: RESTRICTIONS[keyword], "then": {"required": ["a"]}}
            schema = {
                "$ref": "#/$defs/A",
                "$defs": {"A": {"properties": {"x.y": {"items": {"anyOf": [{}, inner]}}}}},
            }
            with pytest.raises(InvalidArgumentError) as caught:
                json_schema_grammar(schema, "tools.2.parameters")
            assert caught.value.field == f"tools.2.parameters.$defs.A.properties.x.y.items.anyOf.1.{keyword}"
            assert keyword in str(caught.value)


def test_unevaluated_properties_of_several_schemas_are_refused():
    schema = {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}
    with pytest.raises(InvalidArgumentError, match=r"^json_schema\.unevaluatedProperties"):
        json_schema_grammar(schema)


NAMED = {
    "type": "object",
    "properties": {"a": {"type": "null"}, "z": {}},
    "propertyNames": {"$ref": "#/$defs/Names"},
    "additionalProperties": {"type": "integer"},
    "$defs": {"Names": {"title": "Names", "type": "string", "enum": ["a", "b"]}},
}
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
    "names of properties can be listed": (
        *(NAMED, ['{"a": null, "b": 1}', '{"b": 2}']),
        ['{"a": 1}', '{"z": 1}', '{"c": 1}'],
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
    *({"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"minItems": 0}, {"minContains": 2}),
    *(
        {"contains": {"type": "null"}, "minContains": 0},
        {"additionalItems": False},
        {"unevaluatedItems": True},
    ),
    *(
        {"propertyNames": names}
        for names in (True, {}, {"type": "string"}, {"type": "string", "minLength": 0})
    ),
    *({"propertyNames": {"$ref": "#/$defs/A"}, "$defs": {"A": {"type": "string"}}}, {"minProperties": 0}),
    *({"dependentRequired": {}}, {"dependentSchemas": {"a": True}}, {"dependencies": {"a": []}}),
    *({"unevaluatedProperties": {}}, {"not": False}, {"if": {"type": "null"}}, {"then": {}, "else": False}),
    *({"if": {"type": "null"}, "then": {}, "else": True}, {"minLength": 0}, {"maxLength": 2.0**40}),
    *(
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"maximum": 2**64 - 1},
        {"minimum": -1.7976931348623157e308},
    ),
    *({"format": "password"}, {"default": 1, "examples": [1], "deprecated": True, "$comment": "c"}),
    *({"readOnly": True, "writeOnly": True, "contentEncoding": "base64", "contentSchema": {"not": {}}},),
    *({"discriminator": {"propertyName": "a"}, "nullable": True, "x-own": 1}, {"$dynamicAnchor": "a"}),
    *({"type": "integer", "uniqueItems": True, "propertyNames": {"format": "uuid"}, "contains": {}},),
]


def test_keywords_that_restrict_nothing_are_accepted(subtests):
    for schema in ANYTHING:
        with subtests.test(str(schema)[:80]):
            assert follows(json_schema_grammar(schema), "1", "-12") == [True, True]


@pytest.mark.parametrize(
    ("names", "good", "bad"),
    [({"pattern": "^k[0-9]+$"}, "k12", "12"), ({"minLength": 2, "maxLength": 3}, "\u00e9\U0001f600", "a")],
)
def test_names_of_properties_can_have_a_pattern_or_lengths(names, good, bad):
    grammar = json_schema_grammar(
        {"type": "object", "propertyNames": names, "additionalProperties": {"const": 1}}
    )
    texts = (json.dumps({name: 1}, ensure_ascii=False) for name in (good, bad))
    assert follows(grammar, *texts, json.dumps({good: 2}, ensure_ascii=False)) == [True, False, False]


@pytest.mark.parametrize(
    ("bound", "good", "bad"),
    [
        ({"minimum": 2**53 + 1}, 2**53 + 2, 2**53),
        ({"maximum": -(2**53) - 1}, -(2**53) - 2, -(2**53)),
        ({"exclusiveMaximum": 2**53 + 1}, 2**53 - 1, 2**53 + 1),
        ({"maximum": 2**63 - 1}, 2**62, 2**63),
        ({"minimum": -(2**63)}, -(2**62), -(2**63) - 1),
        ({"maximum": 2**64 - 1}, 2**62, 2**64),
    ],
    ids=str,
)
def test_bounds_of_large_integers_are_exact(bound, good, bad):
    grammar = json_schema_grammar({"type": "integer", **bound})
    assert follows(grammar, str(good), str(bad)) == [True, False]


def test_alternatives_that_may_overlap_are_not_made_exclusive_by_closing_them():
    """Both alternatives match an object with a and b, since the first one allows further properties."""
    first = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    second = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]}
    for options in (
        [first, second],
        [{"properties": {"x": one}, "required": ["x"], "type": "object"} for one in (first, second)],
    ):
        assert "oneOf" in refusal(json_schema_grammar({"oneOf": options}))


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


CIRCLE: dict = {"type": "object"}
CIRCLE["properties"] = {"again": CIRCLE}


def test_value_that_is_no_schema_is_named(subtests):
    cases = [
        *([], None, "object", 5, {"const": {1, 2}}, {"const": float("nan")}, {"maximum": float("inf")}),
        *(nested(MAX_DEPTH + 1), nested(100_000), CIRCLE),
        *(
            {"multipleOf": 2**31},
            {"multipleOf": 1000003.5},
            {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        ),
        *({"$ref": "#/x", "x": {"multipleOf": 10**4 + 1}}, {"multipleOf": 1e300}, {"multipleOf": 10**400}),
        *({"const": 2**53 + 1}, {"enum": [1, [{"a": -(2**53) - 1}]]}, {"const": 1e300}),
    ]
    for number, schema in enumerate(cases):
        with subtests.test(number=number):
            with pytest.raises(InvalidArgumentError) as caught:
                json_schema_grammar(schema, "mine")
            assert caught.value.field.split(".")[0] == "mine"
            assert caught.value.allowed


def test_deepest_schema_is_accepted():
    assert follows(json_schema_grammar(nested(MAX_DEPTH)), "[" * MAX_DEPTH + '""' + "]" * MAX_DEPTH) == [True]


def test_wide_schema_takes_little_time():
    schema = {"anyOf": [{"properties": {f"p{n}": {"format": "x"}}} for n in range(20_000)]}
    began = time.process_time()
    json_schema_grammar(schema)
    assert time.process_time() - began < 2


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


def test_strings_may_have_escapes_but_no_lone_surrogate():
    texts = ('"\\u00e9"', '"é"', '"\\ud83d\\ude00"', '"\\ud83d"', '"\\ude00\\ud83d"', '"\t"')
    expected = [knows_escapes(), True, knows_escapes(), False, False, False]
    assert follows(json_schema_grammar({"type": "string"}), *texts) == expected


# Regular expressions


def test_regex_grammar_matches_whole_texts(subtests):
    for pattern, good, bad in [
        ("a/b", "a/b", "a"),
        (r"a\/b", "a/b", r"a\/b"),
        (r"\\/", "\\/", "/"),
        (r"\\", "\\", ""),
        ("//x", "//x", ""),
        ("/", "/", ""),
        ("[/]+", "//", "x"),
        ("a\nb", "a\nb", "anb"),
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


@pytest.mark.parametrize("pattern", ["", None, 5, ["a"], "a\\", "a\\\\\\", "\ud800"])
def test_value_that_is_no_regex_is_named(pattern):
    with pytest.raises(InvalidArgumentError) as caught:
        regex_grammar(pattern, "mine")
    assert caught.value.field == "mine"


# Choices and literals


@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=5), TEXTS)
def test_choice_grammar_has_exactly_the_choices(choices, other):
    grammar = choice_grammar(choices)
    assert follows(grammar, *choices) == [True] * len(choices)
    assert follows(grammar, other, "".join(choices) + "!") == [other in choices, False]


@pytest.mark.parametrize(
    "choices", [[], "ab", None, {"a"}, [""], ["a", ""], [1], ["a", None], ["\ud800"]], ids=repr
)
def test_value_that_is_no_choice_is_named(choices):
    with pytest.raises(InvalidArgumentError) as caught:
        choice_grammar(choices, "mine")
    assert caught.value.field == "mine"
