"""Limits of grammars: hostile ones end in typed errors, and no completion spends those of another."""

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import TOO_COMPLEX, GrammarCompiler, GrammarState

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
    before = possible(beyond)
    path = ids("".join(letters(rng) for _ in range(5000)))
    assert beyond.masks([path]) == [TOO_COMPLEX]
    assert possible(beyond) == before
    for other in [*others, compiler().begin(MANY_STATES)]:
        follow(other, "cab", 3)
        assert possible(other)


def test_ambiguity_ends_in_an_error_instead_of_ever_slower_steps():
    state = compiler().begin('start: a\na: "x" | a a | ""')
    with pytest.raises(InvalidArgumentError, match=r"^grammar: .*items"):
        follow(state, "x", 1000)
    assert len(state) > 10


@pytest.mark.slow
def test_a_proposal_beyond_the_limits_leaves_the_completion_as_it_is():
    state = compiler().begin('start: a\na: "x" | a a')
    (x,) = ids("x")
    state.extend([x] * 240)
    before = possible(state)
    for _ in range(2):
        masks = state.masks([[x] * depth for depth in range(14)])
        assert masks[0]
        assert TOO_COMPLEX in masks
        first = masks.index(TOO_COMPLEX)
        assert set(masks[first:]) == {TOO_COMPLEX}
        assert possible(state) == before
    state.extend([x] * 13)
    with pytest.raises(InvalidArgumentError, match=r"^grammar: .*items"):
        possible(state)
    state.truncate(240)
    assert possible(state) == before


def test_a_lexer_beyond_its_limits_begins_again_and_masks_the_completion_only():
    rng = random.Random(0)
    state, fresh = compiler().begin(MANY_STATES), compiler().begin(MANY_STATES)
    committed = ids("".join(letters(rng) for _ in range(8)))
    state.extend(committed)
    assert possible(state)
    assert state.masks([ids("".join(letters(rng) for _ in range(5000)))]) == [TOO_COMPLEX]
    for token_id in committed:
        possible(fresh)
        fresh.extend([token_id])
    for token_id in ids("abcab"):
        assert possible(state) == possible(fresh)
        assert state.masks([(token_id,)]) == [TOO_COMPLEX]
        state.extend([token_id])
        fresh.extend([token_id])


@pytest.mark.slow
def test_a_completion_that_is_read_at_once_does_not_exceed_the_limits_of_single_steps():
    """As after a failover: gamma 0 renews the limits at each token."""
    rng = random.Random(1)
    tokens = ids("".join(letters(rng) for _ in range(1000)))
    slow, fast = compiler().begin(MANY_STATES), compiler().begin(MANY_STATES)
    for token_id in tokens:
        slow.masks([()])
        slow.extend([token_id])
    assert possible(fast)
    fast.extend(tokens)  # with what this one step leaves of the limits
    with pytest.raises(InvalidArgumentError, match="too many expressions"):
        fast.forced(1)  # drafting does not read all of them again
    assert possible(fast) == possible(slow)


ATTRIBUTES = {
    'start: "# " note "\\n"\nnote[max_tokens=6]: /[^\\n]*/': False,
    'start: (line ";")*\nline[stop="\\n"]: /(.|\\n)*/': False,
    'start: "q"* ("z" y | "w")\ny: "k" z\nz[stop=""]: /a*/': False,
    'start: "a" x\nx[max_tokens=3]: %json {"type": "object"}': False,
    'start: "a" x\nx: %lark {\nstart: y\ny[stop="n"]: /b*/\n}': False,
    'start: "a" x "b"\nx[suffix="n"]: /.*/': True,
    'start: "a" x "b"\nx[lazy]: /.*n/': True,
    'start: "a" x "b"\nx[capture]: /n/': True,
    'start: "a"\nx[max_tokens=3]: /n/': True,
    'start: "max_tokens=3" "[stop=]"': True,
}


def test_rules_that_cannot_drop_a_proposal_are_refused_wherever_they_are():
    for grammar, is_possible in ATTRIBUTES.items():
        if is_possible:
            compiler().check(grammar)
        else:
            with pytest.raises(InvalidArgumentError, match=r"^grammar: got a rule with max_tokens= or stop="):
                compiler().check(grammar)
