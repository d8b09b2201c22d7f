"""The parser of tool calls: what is a call, and that no split of the text changes it."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api.http.tools.formats import CallFamily
from orchestrator.api.http.tools.parser import ArgumentText, CallBegun, CallEnded, PlainText
from tests.support.tool_helpers import parsed, parser_of

FAMILIES = HERMES, LLAMA, MISTRAL = CallFamily.HERMES, CallFamily.LLAMA, CallFamily.MISTRAL
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
CALL_F, CALL_G = ("c0", "f", '{"a": 1}', True), ("c1", "g", "{}", True)


def f_called(arguments, is_whole=True):
    return [("c0", "f", arguments, is_whole)]


def hermes(call):
    return f"<tool_call>{call}</tool_call>"


CASES = {
    "hermes two": (HERMES, f"{hermes(F)}\n<tool_call>\n{G}\n</tool_call>\n", "", [CALL_F, CALL_G]),
    "hermes after text": (HERMES, f"Hi.\n{hermes(F)}", "Hi.", [CALL_F]),
    "hermes before text": (HERMES, f"{hermes(F)} Bye <tool", "", [CALL_F]),
    "hermes before another name": (HERMES, hermes(F) + hermes(G.replace("g", "h")), "", [CALL_F]),
    "hermes without close": (HERMES, f"<tool_call>\n{F}", "", [CALL_F]),
    "hermes without first close": (HERMES, f"<tool_call>{F}\n<tool_call>{G}", "", [CALL_F, CALL_G]),
    "hermes one brace too many": (HERMES, f"<tool_call>{F}}}\n</tool_call>", "", [CALL_F]),
    "hermes marker twice": (HERMES, f"<tool_call>\n{hermes(F)}</tool_call>", "", [CALL_F]),
    "hermes arguments first": (
        *(HERMES, hermes('{"arguments": {"a":"}"}, "name": "f"}'), ""),
        f_called('{"a": "}"}'),
    ),
    "hermes further members": (
        *(HERMES, hermes('{"type": "function", "name": "f", "arguments": {}, "id": "x}"}'), ""),
        f_called("{}"),
    ),
    "hermes without arguments": (HERMES, hermes('{"name": "f"}'), "", f_called("{}")),
    "hermes marker in a string": (
        *(HERMES, hermes('{"name": "f", "arguments": {"a": "</tool_call>{\\""}}'), ""),
        f_called('{"a": "</tool_call>{\\""}'),
    ),
    "hermes cut in arguments": (
        *(HERMES, '<tool_call>{"name": "f", "arguments": {"a": "b', ""),
        f_called('{"a": "b', False),
    ),
    "hermes cut before arguments": (HERMES, '<tool_call>{"name": "f", "argum', "", f_called("", False)),
    "hermes arguments that are no JSON": (
        *(HERMES, hermes('{"name": "f", "arguments": {x}}') + "x", ""),
        f_called("{x}}", False),
    ),
    "llama": (LLAMA, F.replace("arguments", "parameters"), "", [CALL_F]),
    "llama two": (LLAMA, f"\n{F}; {G}", "", [CALL_F, CALL_G]),
    "llama two lines": (LLAMA, f"{F}\n{G}\n", "", [CALL_F, CALL_G]),
    "llama python tag": (LLAMA, f"<|python_tag|>{F}", "", [CALL_F]),
    "llama python tag after text": (LLAMA, f"Hm. <|python_tag|>{F}", "Hm.", [CALL_F]),
    "llama text after": (LLAMA, f"{F} ok", "", [CALL_F]),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{F}, {G}]", "", [CALL_F, CALL_G]),
    "mistral after text": (MISTRAL, f"Well [TOOL_CALLS][{F}]", "Well", [CALL_F]),
    "mistral with id": (MISTRAL, f'[TOOL_CALLS][{F[:-1]}, "id": "abcdefghi"}}]', "", [CALL_F]),
    "mistral without a list": (MISTRAL, f"[TOOL_CALLS]{F}", "", [CALL_F]),
    "mistral before another name": (MISTRAL, f"[TOOL_CALLS][{F}, {G.replace('g', 'h')}]", "", [CALL_F]),
}


NO_CALLS = [
    (HERMES, '<tool_call>{"name": "h", "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>f(1)</tool_call>"),
    (HERMES, "a <tool_call> [1] "),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}'),
    (HERMES, '<tool_call>{"name": [], "arguments": {}}'),
    (HERMES, " plain <tool \n"),
    (HERMES, "1 <"),
    (HERMES, ""),
    (LLAMA, '{"name": "Bob", "parameters": {}}'),
    (LLAMA, '{"name": "h", "parameters": {"a'),
    (LLAMA, '{"name": "Bo'),
    (LLAMA, '{"na me'),
    (LLAMA, '{"name": 1'),
    (LLAMA, f"So: {F}"),
    (LLAMA, "  "),
    (MISTRAL, "[TOOL_CALLS][]"),
]
CASES |= {f"{family.name} {text}": (family, text, text, []) for family, text in NO_CALLS}
"""Texts without a call stay as they are."""


def splits(text, rng):
    position = 0
    while position < len(text):
        end = position + rng.choice((1, 1, 2, 3, 5, 8, 40))
        yield text[position:end]
        position = end


def test_every_split_gives_the_same(subtests):
    for name, (family, text, rest, calls) in CASES.items():
        with subtests.test(name):
            for cut in range(len(text) + 1):
                assert parsed(parser_of(family), [text[:cut], *text[cut:]]) == (rest, calls)


PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"),
    *("{", "}", "}}", "[", "]", '"', ",", ";", "\\", " ", "\n", "x", "é😀"),
    *("name", '"name": ', '"f"', '"arguments": ', '{"name": "f", "arguments": {', F, G),
]


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.sampled_from(PARTS), max_size=14).map("".join),
    st.sampled_from([{}, {"max_calls": 1}, {"is_after_marker": True}]),
    st.randoms(use_true_random=False),
)
def test_every_split_of_any_text_gives_the_same(family, text, options, rng):
    whole = parsed(parser_of(family, **options), [text])
    assert parsed(parser_of(family, **options), list(text)) == whole
    assert parsed(parser_of(family, **options), splits(text, rng)) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_any_arguments_are_the_text_that_the_model_wrote(arguments, is_ascii, rng):
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>'
    assert parsed(parser_of(HERMES), splits(text, rng)) == ("", [("c0", "f", written, True)])


WRITTEN = {
    "hermes": (HERMES, f"Hi.\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>"),
    "hermes arguments first": (HERMES, hermes('{"arguments": {"a": 1}, "name": "f"}')),
    "hermes arguments in a string": (HERMES, hermes('{"name": "f", "arguments": "{\\"a\\": 1}"}')),
    "llama": (LLAMA, f"{F}; {G}".replace("arguments", "parameters")),
    "llama python tag": (LLAMA, f"Hi.<|python_tag|>{F}"),
    "mistral": (MISTRAL, f"Hi.[TOOL_CALLS] [{F}, {G}]"),
}


@pytest.mark.parametrize(("family", "text"), WRITTEN.values(), ids=WRITTEN)
def test_calls_that_are_cut_anywhere_are_no_text(family, text):
    whole = [call for call in (CALL_F, CALL_G) if f'"name": "{call[1]}"' in text]
    for end in range(len(text) + 1):
        parser = parser_of(family)
        rest, calls = parsed(parser, splits(text[:end], random.Random(end)))
        assert "Hi.".startswith(rest.rstrip("<[\n"))  # a single character of a marker, and a line before it
        assert len(rest) <= len("Hi.\n<")
        for (own_id, name, arguments, is_whole), own in zip(calls, whole, strict=False):
            assert (own_id, name) == own[:2]
            assert own[2].startswith(arguments)
            assert is_whole <= (arguments == own[2])
        assert parser.is_whole <= all(is_whole for *_, is_whole in calls)
    assert parser.is_whole
    assert calls == whole


@pytest.mark.parametrize(("family", "text"), WRITTEN.values(), ids=WRITTEN)
def test_calls_of_the_only_tool_have_its_name_as_soon_as_they_begin(family, text):
    first = len("Hi.\n") if text.startswith("Hi.\n") else len("Hi.") if text.startswith("Hi.") else 0
    name = "f"
    for end in range(first + 1, len(text)):
        parser = parser_of(family, sole_name=name)
        rest, calls = parsed(parser, [text[:end]])
        assert rest in ("", "Hi.")
        assert calls[0][1] == name


def test_events_come_as_soon_as_they_are_certain():
    parser = parser_of(HERMES)
    assert parser.push("Hi <tool_") == [PlainText("Hi")]
    assert parser.push('call>{"name": "f", ') == []
    assert parser.push('"arguments": {"a') == [CallBegun(0, "c0", "f"), ArgumentText(0, '{"a')]
    assert parser.push('": 1') == [ArgumentText(0, '": 1')]
    assert parser.push("}") == [ArgumentText(0, "}"), CallEnded(0, is_whole=True)]
    assert parser.push("}</tool_call>") == []
    assert parser.finish() == []
    assert parser.num_calls == 1


def test_further_calls_are_dropped_where_one_is_allowed():
    text = f"<tool_call>{F}</tool_call> and <tool_call>{G}</tool_call>"
    parser = parser_of(HERMES, max_calls=1)
    assert parsed(parser, [text]) == ("", [CALL_F])
    assert parser.num_calls == 1


def test_calls_begin_at_once_where_the_prompt_ends_with_the_marker():
    assert parsed(parser_of(MISTRAL, is_after_marker=True), [f" [{F}, {G}]"]) == ("", [CALL_F, CALL_G])
    assert parsed(parser_of(MISTRAL, is_after_marker=True), ["no"]) == ("no", [])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    [
        " " * 200_000,
        "<tool_call>" * 20_000,
        "{" * 200_000,
        "<tool_call>" + "{" * 200_000,
        "[TOOL_CALLS]" + "[" * 99_999,
        '<tool_call>{"name": "f", "arguments": {"a": "' + "b" * 200_000,
        '<tool_call>{"name": "f", "arguments": {x' + "<" * 200_000,
        '<tool_call>{"arguments": {"a": "' + "b" * 200_000,
        "<tool_call>x" * 18_000,
        '<tool_call>{"name": "f", "arguments": {}}</x' * 4500,
        "<tool_call>{" + '{"a":{},' * 25_000,
        "<tool_call>{" + '"arguments":{},' * 13_000,
        '<tool_call>{"arguments": {"a": [' * 6000,
        "</tool_call>" * 16_000,
    ],
    ids=lambda text: text[:30],
)
def test_long_texts_take_linear_time(family, text):
    for size in (4, len(text)):
        start = time.process_time()
        parsed(parser_of(family), (text[at : at + size] for at in range(0, len(text), size)))
        assert time.process_time() - start < 5
