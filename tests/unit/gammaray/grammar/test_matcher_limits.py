"""Limits of grammars: hostile ones end in typed errors, and no completion spends those of another."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler, GrammarState
from gammaray.grammar.texts import json_schema_grammar

# Its states are built as they are met, so that random text soon spends the limits of a step.
MANY_STATES = "start: /(.*a.{8}b|.*c.{7}d)*/"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(Path(resolve_model("demo")) / "tokenizer.json"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer().to_str(), tokenizer().get_vocab_size(), [0])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def letters(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefg") for _ in range(5))


def possible(state: GrammarState) -> set[int]:
    (mask,) = state.masks([()])
    assert mask is not None
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())


def follow(state: GrammarState, text: str, times: int) -> None:
    for _ in range(times):
        state.forced(4)
        state.extend(ids(text))


@pytest.mark.parametrize("seed", range(3))
def test_following_without_masks_does_not_spend_the_limits_of_a_step(seed):
    rng = random.Random(seed)
    state = compiler().begin(MANY_STATES)
    for _ in range(1200):
        state.forced(4)
        state.extend(ids(letters(rng)))


def test_a_completion_beyond_its_limits_does_not_end_another_one():
    rng = random.Random(0)
    others = [compiler().begin(MANY_STATES) for _ in range(2)]
    for other in others:
        follow(other, "bad", 3)
    beyond = compiler().begin(MANY_STATES)
    assert possible(beyond)
    with pytest.raises(InvalidArgumentError, match="too many expressions"):
        beyond.extend(ids("".join(letters(rng) for _ in range(5000))))
    for other in [*others, compiler().begin(MANY_STATES)]:
        follow(other, "cab", 3)
        assert possible(other)


def test_ambiguity_ends_in_an_error_instead_of_ever_slower_steps():
    state = compiler().begin('start: a\na: "x" | a a | ""')
    with pytest.raises(InvalidArgumentError, match=r"^grammar: .*items"):
        follow(state, "x", 1000)
    assert len(state) > 10


def test_right_recursion_ends_in_an_error():
    state = compiler().begin('start: a\na: "x" a | ""')
    with pytest.raises(InvalidArgumentError, match=r"^grammar: .*(items|left-recursive)"):
        follow(state, "x", 2000)
    assert len(state) > 100


def test_many_optional_properties_are_possible():
    names = [f"p{index}" for index in range(100)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    state = compiler().begin(json_schema_grammar(schema))
    state.extend(ids('{"p3": true, "p99": false}'))
    assert state.is_complete
