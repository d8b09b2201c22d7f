"""The state of a grammar: possible and forced tokens against a list of texts, rollback, and limits."""

import itertools
import json
import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import TOO_COMPLEX, GrammarCompiler, GrammarState
from gammaray.grammar.texts import choice_grammar, json_schema_grammar
from tests.support.processing_helpers import (
    AB_OR_BA,
    AB_TEXTS,
    ids_of,
    listed,
    small_compiler,
    small_tokenizer,
    text_of,
)

EOS = (0, 3)
TOKENS = ("<eos>", "a", "b", "<eot>", "ab", "ba", "c", "abc", "bab")
LANGUAGES = {
    AB_OR_BA: AB_TEXTS,
    'start: "ab" ("c" | x)\nx: "ba" | ""': ["abc", "abba", "ab"],
    choice_grammar(["abab", "abc", "b"]): ["abab", "abc", "b"],
    "start: /[ab]{3}/": ["".join(letters) for letters in itertools.product("ab", repeat=3)],
}


JSON_TOKENS = ("<eos>", *'[],Ġ12true"\\-', "<eot>", "[1", ",Ġ", "tr", '"]')
ARRAYS = [
    json.dumps(list(values))
    for count in range(3)
    for values in itertools.product((1, 12, True, '"', "\\1"), repeat=count)
]
ARRAY = {"type": "array", "items": {"enum": [1, 12, True, '"', "\\1"]}, "maxItems": 2}


def begin(grammar: str) -> GrammarState:
    return small_compiler(TOKENS, len(TOKENS) + 3, EOS).begin(grammar)


def outputs(texts: list[str], output: tuple[int, ...] = (), tokens: tuple[str, ...] = TOKENS):
    """Yield every output of possible tokens without an end."""
    yield output
    for token_id in listed(texts, output, tokens):
        if tokens[token_id][:2] != "<e":
            yield from outputs(texts, (*output, token_id), tokens)


def test_possible_tokens_of_a_schema_are_those_of_its_documents():
    """Where all documents go on alike, only the tokenizer's own split of the forced text is possible."""
    compiler = small_compiler(JSON_TOKENS, len(JSON_TOKENS), (0, JSON_TOKENS.index("<eot>")))
    every = list(outputs(ARRAYS, tokens=JSON_TOKENS))
    assert {text_of(output, JSON_TOKENS) for output in every} >= set(ARRAYS)
    num_forced = 0
    masks = compiler.begin(json_schema_grammar(ARRAY)).masks(every)
    for output, mask in zip(every, masks, strict=True):
        text, expected = text_of(output, JSON_TOKENS), listed(ARRAYS, output, JSON_TOKENS)
        if text not in ARRAYS and len({one[len(text)] for one in ARRAYS if one.startswith(text)}) == 1:
            num_forced += 1
            expected = [token_id for token_id in expected if token_id in ids_of(mask)]
            assert expected
        assert ids_of(mask) == expected, text
    assert 0 < num_forced < len(every)


@pytest.mark.parametrize(("grammar", "texts"), LANGUAGES.items())
def test_masks_of_paths_equal_a_replay_of_each(grammar, texts, subtests):
    for seed in range(5):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            every = list(outputs(texts))
            committed = rng.choice(every)
            paths = [tuple(rng.randrange(len(TOKENS)) for _ in range(rng.randrange(4))) for _ in range(30)]
            paths += [output[len(committed) :] for output in every if output[: len(committed)] == committed]
            rng.shuffle(paths)
            state = begin(grammar)
            state.extend(committed)
            for path, mask in zip(paths, state.masks(paths), strict=True):
                expected = listed(texts, committed + path, TOKENS) if committed + path in every else None
                assert ids_of(mask) == expected, (committed, path)
            assert len(state) == len(committed)


@pytest.mark.parametrize("grammar", LANGUAGES)
def test_state_after_rollbacks_is_that_of_its_tokens(grammar, subtests):
    for seed in range(10):
        with subtests.test(seed=seed):
            rng = random.Random(seed)
            texts, state, tokens = LANGUAGES[grammar], begin(grammar), []
            for _ in range(60):
                if rng.random() < 0.4:
                    del tokens[rng.randrange(len(tokens) + 1) :]
                    state.truncate(len(tokens))
                elif not state.is_ended:
                    state.masks([(rng.randrange(len(TOKENS)),) for _ in range(3)])
                    token_id = rng.choice(listed(texts, tokens, TOKENS))
                    tokens.append(token_id)
                    state.extend([token_id])
                else:
                    tokens.append(7)  # whatever follows an end is not tested
                    state.extend([7])
                fresh = begin(grammar)
                fresh.extend(tokens)
                assert state.masks([()]) == fresh.masks([()])
                assert state.forced(9) == fresh.forced(9)
                assert (len(state), state.is_ended) == (len(fresh), fresh.is_ended)


@pytest.mark.parametrize("order", [1, -1])
def test_masks_after_texts_with_the_same_lexemes_are_their_own(order):
    """llguidance finds its last mask by the number of lexemes and the possible next ones alone."""
    tokens = ("<eos>", "a", "b", "y", "z", "y1", "z1", "y2", "z2", "1", "2")
    compiler = small_compiler(tokens, len(tokens), (0,))
    state = compiler.begin('start: "a" ("y" | "z") "1" | "b" ("y" | "z") "2"')
    expected = {(1,): [3, 4, 5, 6], (2,): [3, 4, 7, 8]}
    paths = [(1,), (2,)][::order]
    assert [ids_of(mask) for mask in state.masks(paths)] == [expected[path] for path in paths]
    for path in paths:
        assert ids_of(state.masks([path])[0]) == expected[path]
    for path in paths:
        state.truncate(0)
        state.extend(path)
        assert ids_of(state.masks([()])[0]) == expected[path]


def test_forced_tokens_have_no_alternative():
    state = begin('start: "ab" ("a" | "b") "abc"')
    assert state.forced(9) in ([4], [])  # the next letter may be in a longer token
    state.extend([4, 1])
    assert "".join(TOKENS[token_id] for token_id in state.forced(9)) == "abc"
    assert state.forced(0) == []
    # 7 is the token of "abc".
    assert state.forced(9, [7]) == []
    state.extend([7])
    assert state.count_possible([EOS[0]]) == 1


def test_every_end_of_sequence_ends_the_text():
    for eos in EOS:
        state = begin(AB_OR_BA)
        state.extend([4, eos])
        assert state.is_ended
        assert state.masks([(), (4,)]) == [None, None]
        assert state.forced(9) == []
        assert state.count_possible([4]) == 0
        state.truncate(1)
        assert not state.is_ended
        assert state.count_possible([eos]) == 1


def test_id_that_is_no_token_or_does_not_follow_is_impossible_and_changes_nothing():
    state = begin(AB_OR_BA)
    state.extend([4])
    before = state.masks([()])
    for wrong in (-1, len(TOKENS) + 3, 2**31, 2**32, 2**70):
        assert state.masks([(4, wrong), (wrong,), (), (wrong, 0)]) == [None, None, before[0], None]
        assert state.count_possible([4, wrong, 6]) == 1
        assert state.forced(9, [wrong]) == []
        with pytest.raises(InvalidArgumentError, match=f"^grammar: got token {wrong} at 2 of the completion"):
            state.extend([4, wrong])
        assert (len(state), state.masks([()])) == (1, before)
    for tokens in ([4, 4], [6, 1], [len(TOKENS) + 2]):
        with pytest.raises(InvalidArgumentError, match=r"^grammar: got token \d+ at \d+ of the completion"):
            state.extend(tokens)
        assert (len(state), state.masks([()])) == (1, before)


@pytest.mark.parametrize("grammar", ["start: /(?s:.)*/", 'start: %json {"type": "string"}'])
def test_special_token_is_impossible_where_its_text_is_possible(grammar):
    tokens = ("<eos>", '"', "a", "<", ">", "|", "<|user|>")
    state = GrammarCompiler(small_tokenizer(tokens, (0, 6)), len(tokens), [0]).begin(grammar)
    state.extend([1, 2])
    ends = [0] if state.count_possible([0]) else []
    assert ids_of(state.masks([()])[0]) == [*ends, 1, 2, 3, 4, 5]
    assert state.masks([(6,)]) == [None]
    assert state.count_possible([3, 6]) == 1
    with pytest.raises(InvalidArgumentError, match=r"^grammar: got token 6 at 3"):
        state.extend([2, 6])


def test_wrong_grammars_are_refused_with_the_reason(subtests):
    for grammar, reason in [
        ("", "grammar"),
        ("start: missing", "missing"),
        ('root ::= "a"', "grammar"),  # GBNF
        ("start: A\nA: /a(?=b)/", "look"),
        ('start: %json {"$ref": "#/$defs/none"}', "none"),
        ('start: %json {"type": "object", "minProperties": 3, "maxProperties": 2}', "grammar"),
        ("start: <[1]>", "no tokens by number"),
        ("start: A\nA: /[^\\x00-\\U0010FFFF]/", "without a text"),
        ("\x00", "grammar"),
        ("start: \ud800", "surrogate"),
        ("start: start", "without a text"),
        ('start: "z"', "without a text"),
        ('start: %json {"enum": []}', "Unsatisfiable"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        ("start: /" + "(" * 5000 + "a" + ")" * 5000 + "/", "nest|limit"),
        ("start: %json " + '{"items": ' * 5000 + "{}" + "}" * 5000, "recursion"),
        ("start: " + '"a" | ' * 80_000 + '"b"', "too big|limit|large|size"),
    ]:
        with subtests.test(ascii(grammar)[:80]):
            for _ in range(2):
                with pytest.raises(InvalidArgumentError, match=rf"^grammar: .*{reason}"):
                    begin(grammar)


@pytest.mark.parametrize("ends", [(0,), (0, 3), (0, 5), (0, 3, 5, 7), (3,), (2, 8)])
def test_tokens_that_end_a_completion_are_as_those_of_a_compiler_that_has_them(ends):
    """One compiler serves every set of end tokens, whether or not they are text of the grammar."""
    rng = random.Random(0)
    shared = small_compiler(TOKENS, len(TOKENS) + 3, EOS)
    own = GrammarCompiler(small_tokenizer(TOKENS, EOS), len(TOKENS) + 3, ends)
    for grammar in LANGUAGES:
        for _ in range(20):
            one, other = shared.begin(grammar, ends), own.begin(grammar)
            for _ in range(8):
                (mask,), (expected,) = one.masks([()]), other.masks([()])
                assert ids_of(mask) == ids_of(expected)
                possible = ids_of(mask)
                if not possible or one.is_ended:
                    break
                token_id = rng.choice(possible)
                assert one.count_possible([token_id]) == other.count_possible([token_id])
                one.extend([token_id])
                other.extend([token_id])
    masks = [shared.begin("start: /a?/", given).masks([()]) for given in ((*ends, 10**6), ends)]
    assert masks[0] == masks[1], "an end outside of the vocabulary is ignored"


DEMO = Tokenizer.from_file(str(Path(resolve_model("demo")) / "tokenizer.json"))
# Its states are built as they are met, so that random text soon spends the limits of a step.
MANY_STATES = "start: /(.*a.{8}b|.*c.{7}d)*/"


@cache
def demo_compiler() -> GrammarCompiler:
    return GrammarCompiler(DEMO.to_str(), DEMO.get_vocab_size(), [0])


def ids(text: str) -> list[int]:
    return DEMO.encode(text, add_special_tokens=False).ids


def letters(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefg") for _ in range(5))


def possible(state: GrammarState) -> set[int]:
    (mask,) = state.masks([()])
    return set(ids_of(mask))


def follow(state: GrammarState, text: str, times: int) -> None:
    for _ in range(times):
        state.forced(4)
        state.extend(ids(text))


@pytest.mark.parametrize("seed", range(3))
def test_following_without_masks_does_not_spend_the_limits_of_a_step(seed):
    rng = random.Random(seed)
    state = demo_compiler().begin(MANY_STATES)
    for _ in range(1200):
        state.forced(4)
        state.extend(ids(letters(rng)))


def test_a_completion_beyond_its_limits_does_not_end_another_one():
    rng = random.Random(0)
    others = [demo_compiler().begin(MANY_STATES) for _ in range(2)]
    for other in others:
        follow(other, "bad", 3)
    beyond = demo_compiler().begin(MANY_STATES)
    before = possible(beyond)
    path = ids("".join(letters(rng) for _ in range(5000)))
    assert beyond.masks([path]) == [TOO_COMPLEX]
    assert possible(beyond) == before
    for other in [*others, demo_compiler().begin(MANY_STATES)]:
        follow(other, "cab", 3)
        assert possible(other)


def test_ambiguity_ends_in_an_error_instead_of_ever_slower_steps():
    state = demo_compiler().begin('start: a\na: "x" | a a | ""')
    with pytest.raises(InvalidArgumentError, match=r"^grammar: .*items"):
        follow(state, "x", 1000)
    assert len(state) > 10


@pytest.mark.slow
def test_a_proposal_beyond_the_limits_leaves_the_completion_as_it_is():
    state = demo_compiler().begin('start: a\na: "x" | a a')
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
    state, fresh = demo_compiler().begin(MANY_STATES), demo_compiler().begin(MANY_STATES)
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
    slow, fast = demo_compiler().begin(MANY_STATES), demo_compiler().begin(MANY_STATES)
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
            demo_compiler().check(grammar)
        else:
            with pytest.raises(InvalidArgumentError, match=r"^grammar: got a rule with max_tokens= or stop="):
                demo_compiler().check(grammar)
