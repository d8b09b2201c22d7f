"""Parts of grammars that are refused, as llguidance reads the text, and the same characters elsewhere."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.syntax import check_syntax

TOKENIZER = LLTokenizer((Path(resolve_model("demo")) / "tokenizer.json").read_text())
SPECIAL = "&~<[;]>|^/\"\\' #%@{}().:,=-_!?+*059azAZé\t"
"""Characters that mean something to the lexer, and a few others."""


def refused(grammar: str) -> str:
    """Return the part for which a grammar is refused; empty if it is none."""
    try:
        check_syntax(grammar, TOKENIZER)
    except InvalidArgumentError as error:
        return error.got
    return ""


def compiles(grammar: str) -> bool:
    return not LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(grammar), log_level=0).is_error()


# What makes a second lexer believe that a string or an expression goes on, where llguidance's does not.
HIDING = [
    "B: </s>",
    "B: </think> | /x/",
    "B: /x\n/",
    'B: "a" // "',
    "B: /[/]/",
    "B: /[/]/\nC: /]/",
    'B: "\\""i "/"',
    'B: %regex {"substring_words": "a / b"}',
    'b: %json {"pattern": "/"}',
    '// "/\nB: "b"',
    '# /\nB: "\x85/"',
    "%ignore /[ \\t]+/",
    "%import common.INT",
    'b: %lark { start: "/" }',
]


def test_operators_are_found_whatever_comes_before(subtests):
    for before in HIDING:
        with subtests.test(str(before)[:80]):
            for part, operator in (
                ("A: /a+/ & /b*a/", "&"),
                ("A: ~/a+/", "~"),
                ("A: /a/\nc: A <[5-7,9]>", "<[5-7,9]>"),
            ):
                grammar = f"start: A\n{before}\n{part}"
                assert operator in refused(grammar) or not compiles(grammar)


def test_the_same_characters_elsewhere_are_none(subtests):
    for grammar in [
        'start: "a&b~c<[5]>"',
        "start: /a&b~<[c]/",
        'start: "x"~3',
        r'start: "\"&" /\/~/',
        'start: %json {"const": "a & ~b <[1]>"}',
        "start: A // a comment with & and <[1]>\nA: /a/",
        'start: temperature\ntemperature: "temperature"',
        'start[capture="temperature"]: /a/',
    ]:
        with subtests.test(grammar[:80]):
            assert refused(grammar) == ""
            assert compiles(grammar)


def test_temperature_of_a_rule_is_refused():
    for grammar in (
        "start[temperature=0.5]: /a/",
        'start: a "~"\na[ lazy, temperature = 1 ]: /a/',
        'start: %lark { start: A\nA[temperature=1]: /a/ } "&"',
        "%lark\nstart[temperature=0]: /a/",
    ):
        with pytest.raises(InvalidArgumentError, match=r"^grammar: "):
            check_syntax(grammar, TOKENIZER)
    assert "temperature" in refused("start[temperature=0.5]: /a/")


def quoted(chars: str) -> st.SearchStrategy[str]:
    return st.text(st.sampled_from(chars), max_size=6)


PLAIN = SPECIAL.translate(dict.fromkeys(map(ord, '"\\\t')))

LEXEMES = st.one_of(
    quoted(PLAIN).map('"{}"'.format),
    quoted(SPECIAL.replace("/", "").replace("\\", "")).map("/x{}/".format),
    quoted(SPECIAL.replace("\\", "").replace('"', "").replace("\t", "")).map(
        '%json {{"const": "{}"}}'.format
    ),
    quoted(SPECIAL).map("// {}\n".format),
    quoted(SPECIAL).map("# {}\n".format),
    quoted("&~;|/\"'#a").map("<x{}>".format),
    st.sampled_from(
        ["a", "B", "|", "(", ")", "[", "]", '"x"~3', '"x" ~ 1..2', "\n", "/[a&&b]/", '"&"i', ":", "->"]
    ),
)
"""Lexemes without a refused part."""


@settings(deadline=None, max_examples=400)
@given(
    st.lists(LEXEMES, max_size=8), st.sampled_from(["&", "~ ", "~(", "<[7]>", "<[^1-2]>"]), st.integers(0, 8)
)
def test_a_part_among_lexemes_is_refused_and_lexemes_are_not(lexemes, part, at):
    """Lexemes in any order: only an error of llguidance's own, about the same text, may come before."""
    text = " ".join(lexemes)
    found = refused(text)
    assert not found.startswith(("the operator", "<[")), (text, found)
    with_part = " ".join([*lexemes[:at], part, *lexemes[at:]])
    assert refused(with_part) != "", with_part


@settings(deadline=None, max_examples=600)
@given(st.text(st.sampled_from(SPECIAL + "\n&~"), max_size=24))
def test_grammar_of_any_text_that_compiles_is_refused_or_has_no_operator(noise):
    """The oracle is llguidance: an operator needs operands, where a quoted one is any character.

    So a text that passes and compiles does so as well with each `&` doubled, which is no expression.
    """
    grammar = f'start: "x"\na: "b" {noise}\nB: /c/'
    if refused(grammar) or not compiles(grammar):
        return
    for at, char in enumerate(grammar):
        if char == "&":
            doubled = f"{grammar[:at]}&&{grammar[at + 1 :]}"
            assert compiles(doubled), doubled


@pytest.mark.slow
def test_text_that_only_begins_parts_takes_linear_time():
    def cpu_s(text: str) -> float:
        began = time.process_time()
        refused(text)
        return time.process_time() - began

    for piece in ("<[", "\\/", "&", "~ ", '"&"|', "temperature ", "%json [", "#"):
        texts = ["start: " + piece * (size // len(piece)) for size in (2**16, 2**17)]
        once, twice = (min(cpu_s(text) for _ in range(3)) for text in texts)
        assert twice < 0.02 or twice < 3 * once, piece
