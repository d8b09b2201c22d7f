"""The guard of keys: repeated and misspelt ones, rollback, paths of a proposal, and thinking parts."""

from __future__ import annotations

import json
import random

import pytest

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.keys import KeyGuard, KeyTokens
from gammaray.grammar.matcher import GrammarState
from gammaray.grammar.texts import json_schema_grammar
from tests.support.grammar_versions import since_1_9
from tests.support.processing_helpers import small_compiler

TOKENS = (
    *("<eos>", *'{}[]"ab\\u061n:,Ġ', "</think>", "<think>"),
    *('",Ġ"', '"a":Ġ', '{"a', 'a"', '":Ġ', "\\u", "006", '1,Ġ"a"', '"a"', "1}", '},Ġ"', 'b",Ġ"b'),
)
ANY = json_schema_grammar({"type": "object", "additionalProperties": {"enum": [1, "a", {"a": 1}]}})
FEW = json_schema_grammar(
    {"type": "object", "patternProperties": {"^(a|ab|b)$": {"const": 1}}, "additionalProperties": False}
)
PIECES = [b"" if token == "<eos>" else token.replace("Ġ", " ").encode() for token in TOKENS]


def begin(grammar: str) -> GrammarState:
    return small_compiler(TOKENS, len(TOKENS), (0,)).begin(grammar)


def spelt(text: str) -> list[int]:
    """Return single characters as tokens."""
    return [TOKENS.index("Ġ" if sign == " " else sign) for sign in text]


def possible(state: GrammarState, path: list[int] | tuple[int, ...] = ()) -> set[str]:
    mask = int.from_bytes(state.masks([path])[0] or b"", "little")
    return {token for token_id, token in enumerate(TOKENS) if mask >> token_id & 1}


def test_token_that_completes_a_repeated_key_is_not_possible():
    state = begin(ANY)
    state.extend(spelt('{"a": 1, "'))
    assert {"a", "b"} <= possible(state)
    assert 'a"' not in possible(state)
    state.extend(spelt("a"))
    assert {"a", 'a"'} <= possible(state)
    assert not {'"', '":Ġ'} & possible(state)
    with pytest.raises(InvalidArgumentError, match="token 5 at 11 of the completion"):
        state.extend(spelt('"'))
    state.extend(spelt('b": 1'))
    assert '1,Ġ"a"' not in possible(state)


def test_keys_have_only_the_escapes_that_they_need():
    state = begin(ANY)
    state.extend(spelt('{"\\'))
    assert {"\\", '"', "n"} <= possible(state)
    state.extend(spelt("u00"))
    assert possible(state) == {"0", "006", "1"}
    state.truncate(2)
    assert state.count_possible(spelt("\\u0061")) == len("\\u00")
    assert state.count_possible(spelt('\\u0016"')) == len('\\u0016"')


@since_1_9
def test_values_may_have_escapes_that_they_do_not_need():
    values = json_schema_grammar({"type": "object", "properties": {"a": {"type": "string"}}})
    assert begin(values).count_possible(spelt('{"a": "\\u0061"}')) == 15


def test_object_goes_on_only_if_there_is_another_key():
    state = begin(FEW)
    state.extend(spelt('{"a": 1, "b": 1'))
    assert {",", "}"} <= possible(state)
    assert not {'1,Ġ"a"'} & possible(state)
    state.extend(spelt(', "ab": 1'))
    assert possible(state) & {",", "}", "1}"} == {"}"}
    state.truncate(len('{"a": 1, "b": 1'))
    state.extend(spelt(', "'))
    assert possible(state) == {"a"}, "only ab is left"


@pytest.mark.parametrize("grammar", [ANY, FEW])
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_paths_equal_those_of_a_replay(grammar, seed):
    rng, walk = random.Random(seed), begin(grammar)
    paths: list[list[int]] = [[]]
    for _ in range(30):
        choices = [TOKENS.index(token) for token in possible(walk, paths[-1]) if token != "<eos>"]
        if not choices:
            break
        paths.append([*paths[-1], rng.choice(sorted(choices))])
    paths += [[*path, token_id] for path in paths for token_id in range(1, len(TOKENS))]
    paths = rng.sample(paths, min(len(paths), 100))
    state, start = begin(grammar), paths[-1][:2]
    replayed = []
    for path in paths:
        fresh = begin(grammar)
        is_possible = fresh.count_possible(path) == len(path)
        if is_possible:
            fresh.extend(path)
        replayed.append(fresh.masks([()])[0] if is_possible else None)
    assert state.masks(paths) == replayed
    assert any(mask is None for mask in replayed)
    if begin(grammar).count_possible(start) == len(start):
        state.extend(start)
        state.truncate(0)
        assert state.masks(paths) == replayed, "after a rollback"


def test_forced_tokens_end_before_a_repeated_key():
    schema = {"type": "object", "patternProperties": {"^aa*$": {"const": 1}}, "additionalProperties": False}
    state = begin(json_schema_grammar(schema))
    text = '{"a": 1'
    state.extend(spelt(text))
    after = state.forced_after(spelt(","), 20)
    assert state.count_possible([*spelt(","), *after]) == 1 + len(after)


def read_keys(guard: KeyGuard, text: str) -> int:
    return guard.extend(spelt(text))


def test_guard_begins_after_a_thinking_part():
    tokens, think, end = KeyTokens(PIECES), TOKENS.index("<think>"), TOKENS.index("</think>")
    repeated = '{"a": 1, "a"'
    assert read_keys(KeyGuard(tokens), repeated) == len(repeated) - 1
    thinking = KeyGuard(tokens, is_thought=True)
    assert read_keys(thinking, repeated) == len(repeated)
    assert thinking.extend([end]) == 1
    assert read_keys(thinking, repeated) == len(repeated) - 1
    later = KeyGuard(tokens)
    assert later.extend([think, *spelt(repeated), end, *spelt(repeated)]) == 2 + 2 * len(repeated) - 1


def test_guard_is_for_grammars_with_open_objects_only():
    tokens = KeyTokens(PIECES)
    closed = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}}
    assert KeyGuard.of(json_schema_grammar(closed), lambda: tokens) is None
    assert (
        KeyGuard.of(json_schema_grammar({"const": json.dumps({"x-unique-keys": "free"})}), lambda: tokens)
        is None
    )
    for schema in ({}, {"type": "array"}, {"type": "object"}, {**closed, "additionalProperties": True}):
        assert KeyGuard.of(json_schema_grammar(schema), lambda: tokens) is not None
