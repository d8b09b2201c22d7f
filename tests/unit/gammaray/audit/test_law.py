"""The law's tests: fair bets, whatever the list of a server looks like, and the power that they promise."""

import functools
import itertools
import math
import random
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gammaray.audit.law import (
    ALTERNATIVES,
    FAMILIES,
    LOG_STAKES,
    Bets,
    IndependenceTest,
    LawTest,
    Position,
    pair_log_factors,
)
from gammaray.errors import InvalidArgumentError

LISTED = 8


def law(seed, vocab=24, exponent=1.3):
    """Return log-probabilities by token: Zipf's law with noise, in a random order."""
    rng = random.Random(seed)
    logits = [-exponent * math.log(rank) + rng.gauss(0, 0.5) for rank in range(1, vocab + 1)]
    rng.shuffle(logits)
    total = math.log(math.fsum(map(math.exp, logits)))
    return {token: logit - total for token, logit in enumerate(logits)}


def top(log_probs, count=LISTED):
    return dict(sorted(log_probs.items(), key=lambda item: -item[1])[:count])


def draw(rng, log_probs, power=1.0):
    return rng.choices([*log_probs], [math.exp(power * value) for value in log_probs.values()])[0]


def bfloat16(value):
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.unpack("<f", struct.pack("<I", (bits + 0x8000) & 0xFFFF0000))[0]


def means(position, probs, drafted=None):
    """Return the mean factor of every alternative over cells of the probabilities `probs`."""
    factors = np.exp([Bets(position, drafted).log_factors(cell) for cell in range(len(position.probs))])
    return np.asarray(probs) @ factors


@pytest.mark.parametrize("exponent", [0.3, 1.3, 3.0, 6.0])
def test_every_bet_is_fair(exponent):
    for seed in range(10):
        log_probs = law(seed, exponent=exponent)
        position = Position.read(top(log_probs), LISTED)
        for drafted in (None, 0, 3, len(position.probs) - 1):
            found = means(position, position.probs, drafted)
            assert found.max() <= 1 + 1e-12
            if drafted is None:
                assert found.min() > 1 - 1e-4, "the errors of float32 cost next to nothing"


def test_bets_of_two_cells_by_hand():
    position = Position.read({"a": math.log(0.75), "b": math.log(0.25)}, 4)
    assert position.probs == pytest.approx([0.75, 0.25, 0.0])
    bets = [dict(zip(ALTERNATIVES, Bets(position).log_factors(cell), strict=True)) for cell in range(2)]

    def factors(name):
        return [math.exp(bets[cell][name]) for cell in range(2)]

    assert factors("top-1 share: 0.02") == pytest.approx([0.98 + 0.02 / 0.75, 0.98], abs=1e-6)
    assert factors("top-1 share: -0.02") == pytest.approx([1.02 - 0.02 / 0.75, 1.02], abs=1e-6)
    likely = 0.75**5 / (0.75**5 + 0.25**5)
    assert factors("likely-token share: 0.08")[1] == pytest.approx(
        0.92 + 0.08 * (1 - likely) / 0.25, abs=1e-6
    )
    tempered = [0.75**1.32, 0.25**1.32]
    expected = [tempered[0] / sum(tempered) / 0.75, tempered[1] / sum(tempered) / 0.25]
    assert factors("temperature 0.758") == pytest.approx(expected, abs=1e-6)
    assert factors("cut by top_p 0.8: 0.95") == pytest.approx([1, 1], abs=1e-6), (
        "the second token crosses 0.8"
    )
    assert factors("cut by min_p 0.1: 0.95") == pytest.approx([1, 1], abs=1e-6)
    assert factors("unlisted tokens missing: 0.95") == pytest.approx([1, 1], abs=1e-6)


def test_cuts_end_where_the_parameters_cut():
    cells = {"a": 0.6, "b": 0.3, "c": 0.05, "d": 0.03, "e": 0.001}
    position = Position.read({token: math.log(p) for token, p in cells.items()}, 5)
    assert list(position.index) == ["a", "b", "c"], "with five listed tokens, those above the fourth"
    found = np.array([Bets(position).log_factors(cell) for cell in range(4)])
    factors = dict(zip(ALTERNATIVES, np.exp(found).T, strict=True))
    assert factors["cut by top_p 0.8: 0.95"] == pytest.approx(
        [0.05 + 0.95 / 0.9, 0.05 + 0.95 / 0.9, 0.05, 0.05], abs=1e-5
    )
    assert factors["cut by min_p 0.1: 0.5"] == pytest.approx(
        [0.5 + 0.5 / 0.95, 0.5 + 0.5 / 0.95, 0.5, 0.5 + 0.5 / 0.95], abs=1e-5
    )
    kept = 0.98 - 0.95  # of the rest's 0.05
    assert factors["cut by top_p 0.98: 0.5"][3] == pytest.approx(0.5 + 0.5 * kept / 0.05 / 0.98, abs=1e-5)


def test_wealth_is_the_mean_of_the_gamblers():
    assert math.fsum(map(math.exp, LOG_STAKES)) == pytest.approx(1.0)
    assert len(LOG_STAKES) == len(ALTERNATIVES) == len(set(ALTERNATIVES))
    test, rng, wealth = LawTest(0.005, LISTED), random.Random(1), np.array(LOG_STAKES)
    values = []
    for seed in range(40):
        log_probs = law(seed)
        token = draw(rng, log_probs, 3.0)
        test.observe(token, top(log_probs), log_probs[token])
        position = Position.read(top(log_probs), LISTED)
        wealth += Bets(position).log_factors(position.cell_of(token))
        values.append(math.log(np.exp(wealth).sum()))
        assert test.log_e_value == pytest.approx(values[-1])
        assert test.strongest() == ALTERNATIVES[wealth.argmax()]
    first = next(number for number, value in enumerate(values, 1) if value >= math.log(200))
    assert test.num_tokens_until_rejected == first < 40
    assert test.largest_log_e_value == pytest.approx(max(values))


def test_rejection_stays_when_the_wealth_is_lost():
    test = LawTest(0.05, 4)
    cells = {"a": math.log(0.6), "b": math.log(0.4)}
    while not test.rejected:
        test.observe("a", cells)
    number = test.num_tokens
    for _ in range(200):
        test.observe("b", cells)
        test.observe("a", cells)
    assert test.rejected
    assert test.num_tokens_until_rejected == number


@st.composite
def rounded_laws(draw_from):
    """Laws over ten tokens with ties: coarse logits."""
    logits = draw_from(st.lists(st.integers(-12, 0), min_size=10, max_size=10))
    total = math.log(math.fsum(math.exp(logit / 2) for logit in logits))
    return {token: logit / 2 - total for token, logit in enumerate(logits)}


@settings(max_examples=40, deadline=None)
@given(rounded_laws(), st.permutations(range(10)))
def test_cells_do_not_depend_on_the_token_that_was_drawn(log_probs, order):
    """Whether a server lists the drawn token apart, adds it or lets it take the last place, in any order."""
    best = sorted(order, key=lambda token: -log_probs[token])[:6]
    for adds in (lambda token: [], lambda token: [token]):
        for listed in (best, best[:5]):
            seen = set()
            for token in range(10):
                extra = [other for other in adds(token) if other not in listed]
                if len(listed) < 6:
                    extra = extra or best[5:]
                position = Position.read({other: log_probs[other] for other in [*listed, *extra]}, 6)
                seen.add(tuple(sorted(position.index)))
            assert len(seen) == 1


@settings(max_examples=60, deadline=None)
@given(rounded_laws())
def test_means_are_at_most_one_with_the_rest_drawn_from_all_other_tokens(log_probs):
    position = Position.read(top(log_probs, 6), 6)
    if position.is_certain:
        return
    masses = [0.0] * len(position.probs)
    for token, value in log_probs.items():
        masses[position.cell_of(token, value)] += math.exp(value)
    assert masses == pytest.approx(list(position.probs), abs=1e-9)
    assert means(position, masses).max() <= 1 + 1e-9


def half_precision(value):
    return float(np.float16(value))


def largest_mean(log_probs, rounded):
    """The largest mean of a bet under the true probabilities, if the reported ones are rounded."""
    position = Position.read(top({token: rounded(value) for token, value in log_probs.items()}), LISTED)
    if position.is_certain:
        return 1.0
    masses = [0.0] * len(position.probs)
    for token, value in log_probs.items():
        masses[position.index.get(token, len(masses) - 1)] += math.exp(value)
    return means(position, masses).max()


DIGITS = [functools.partial(round, ndigits=digits) for digits in (1, 2, 3, 4)]


@pytest.mark.parametrize("rounded", [bfloat16, half_precision, *DIGITS])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), exponent=st.floats(0.3, 4.0))
@example(183, 1.0)  # with one digit nearly all are off by 0.05
@example(210, 1.0)
def test_rounding_makes_no_bet_profitable(rounded, seed, exponent):
    """Probabilities reported in bfloat16 are off by up to 0.8 %."""
    assert largest_mean(law(seed, exponent=exponent), rounded) <= 1 + 1e-9


def test_listed_tokens_of_equal_text_are_one_cell_and_partial_characters_are_the_rest():
    pairs = [("a", 0.5), ("b", 0.2), ("a", 0.1), ("\ufffd", 0.05), ("c", 0.05), ("d", 0.02), ("e", 0.01)]
    position = Position.read([(token, math.log(p)) for token, p in pairs], 7)
    assert list(position.index) == ["a", "b", "c"]
    assert position.probs == pytest.approx([0.6, 0.2, 0.05, 0.15])
    assert position.cell_of("a", math.log(0.1)) == 0
    assert position.cell_of("a", math.log(0.004)) == 3, "an unlisted token of the same text"
    assert position.cell_of("a") == position.cell_of("a", 0.0) == 0
    for token, p in (("e", 0.01), ("\ufffd", 0.05), ("x", 0.001)):
        assert position.cell_of(token, math.log(p)) == 3


def test_probabilities_that_sum_to_more_than_one_by_rounding():
    listed = {"a": math.log(0.7), "b": math.log(0.30005), "c": -9.0, "d": -10.0}
    position = Position.read(listed, 4)
    assert math.fsum(position.probs) == pytest.approx(1.0)
    assert position.probs[-1] == 0.0
    test = LawTest(0.005, 4)
    test.observe("d", listed)
    assert math.isfinite(test.log_e_value), "the rest was drawn though nothing is left for it"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (math.nan, -1.0, r"cells\['a'\]: .*a log-probability"),
        (0.5, -1.0, r"cells\['a'\]: .*a log-probability"),
        (-0.5, -0.5, r"cells: got probabilities of 1\.2\d+ together"),
    ],
)
def test_values_that_are_no_log_probabilities_are_refused(a, b, words):
    with pytest.raises(InvalidArgumentError, match=words):
        LawTest(0.005, 4).observe("a", {"a": a, "b": b, "c": -4.0, "d": -5.0})


@pytest.mark.parametrize("kind", [LawTest, IndependenceTest])
def test_arguments_are_checked(kind):
    for field, arguments in (("alpha", (0.0, 20)), ("alpha", (0.6, 20)), ("num_listed", (0.1, 3))):
        with pytest.raises(InvalidArgumentError, match=f"^{field}:"):
            kind(*arguments)


def test_positions_that_are_certain_or_list_too_few_tokens_say_nothing():
    test = LawTest(0.005, 20)
    test.observe("a", {"a": -1.0, "b": -2.0, "c": -3.0})
    test.observe("a", {"a": -1e-6, **dict.fromkeys("bcdefghijklmnopqrst", -15.0)})
    assert (test.num_tokens, test.num_unreadable, test.log_e_value) == (2, 1, 0.0)
    assert test.smallest_detectable()["top-1 share"] == math.inf
    test.observe("a", {"a": math.log(0.6), "b": math.log(0.4)})
    assert test.num_unreadable == 1, "two tokens that sum to 1 are all that there are"
    assert test.log_e_value != 0.0


def test_hidden_and_unlikely_tokens_are_left_out_of_the_cells():
    cells = {"a": math.log(0.4), "</s>": math.log(0.5), "b": math.log(0.08), "c": -6.0, "d": -7.0}
    position = Position.read(cells, 5, {"</s>"})
    assert list(position.index) == ["a", "b"]
    assert position.probs == pytest.approx([0.8, 0.16, 0.04])
    test = LawTest(0.005, 5, {"</s>"})
    test.observe("</s>", cells)
    assert test.num_tokens == 0
    assert Position.read(cells | {"</s>": math.log(0.95), "a": -4.0, "b": -5.0}, 5, {"</s>"}) is None
    cells = {"a": math.log(0.9), "b": math.log(0.1), "c": -math.inf, "d": -9999.0, "e": -20.0}
    assert list(Position.read(cells, 5).index) == ["a", "b"]


def table_of(count):
    """Return positions, their laws over cells, and the factors [position, cell, alternative] of all draws."""
    positions = [Position.read(top(law(seed, exponent=1.0 + seed % 5 / 3)), LISTED) for seed in range(count)]
    width = max(len(position.probs) for position in positions)
    factors = np.zeros((count, width, len(ALTERNATIVES)))
    probs = np.zeros((count, width))
    for number, position in enumerate(positions):
        bets = Bets(position)
        probs[number, : len(position.probs)] = position.probs
        for cell in range(len(position.probs)):
            factors[number, cell] = bets.log_factors(cell)
    return positions, probs, factors


def largest(probs, factors, rng, num_tokens):
    """Return the largest logarithm of the e-value of an audit whose cells are drawn from `probs`."""
    places = np.arange(num_tokens) % len(probs)
    cells = (rng.random((num_tokens, 1)) > probs.cumsum(1)[places]).sum(1).clip(max=probs.shape[1] - 1)
    wealth = np.array(LOG_STAKES) + factors[places, cells].cumsum(0)
    most = wealth.max(1)
    return (most + np.log(np.exp(wealth - most[:, None]).sum(1))).max()


@pytest.mark.slow
@pytest.mark.statistical
def test_smallest_detectable_share_is_found_with_the_power_that_is_promised():
    """80 % of 200 audits, with three standard errors of 2.8 %; other gamblers help, the grid's gaps cost."""
    num_tokens, (positions, probs, factors) = 1000, table_of(30)
    test = LawTest(0.005, LISTED)
    for number in range(30):
        test.observe("none", top(law(number, exponent=1.0 + number % 5 / 3)))
    share = test.smallest_detectable()["top-1 share"] * math.sqrt(30 / num_tokens)
    biased = probs * (1 - share)
    for number, position in enumerate(positions):
        biased[number, position.probs.index(max(position.probs[:-1]))] += share
    rng = np.random.default_rng(6)
    found = sum(largest(biased, factors, rng, num_tokens) >= math.log(200) for _ in range(200)) / 200
    assert 0.71 <= found <= 0.93


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("share", "among", "found"), [(0.02, 24, "unlisted-token share"), (0.05, 5, "any-token share")]
)
def test_tokens_that_fit_nowhere_are_found(share, among, found):
    """Some tokens are any of the vocabulary, or any of its five most likely ones."""
    rng, test = random.Random(3), LawTest(0.005, LISTED)
    for _ in range(2000):
        log_probs = law(rng.random(), exponent=3.0)
        stray = rng.choice(sorted(log_probs, key=log_probs.get)[-among:])
        token = stray if rng.random() < share else draw(rng, log_probs)
        test.observe(token, top(log_probs), log_probs[token])
    assert test.rejected
    assert test.strongest().startswith(found)
    assert test.smallest_detectable()[found] < 0.1


def test_more_tokens_show_smaller_faults():
    test, found = LawTest(0.005, LISTED), []
    for number in range(400):
        test.observe("none", top(law(number % 20)))
        found.append(test.smallest_detectable())
    assert set(found[-1]) == {family.name for family in FAMILIES if family.name != "temperature"} | {
        "temperature below 1",
        "temperature above 1",
    }
    assert found[-1]["draft share"] == math.inf, "no draft is known"
    assert found[-1]["temperature below 1"] > found[99]["temperature below 1"]
    assert found[-1]["temperature above 1"] < found[99]["temperature above 1"]
    assert found[-1]["top-1 share"] == pytest.approx(found[99]["top-1 share"] / 2, rel=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_rounding_makes_no_bet_on_pairs_profitable(seed):
    laws = law(seed), law(seed + 1)
    here, there = (Position.read(top({t: bfloat16(x) for t, x in p.items()}), LISTED) for p in laws)
    sizes = len(here.probs), len(there.probs)
    factors = np.exp(
        [[pair_log_factors(here, there, i, j) for j in range(sizes[1])] for i in range(sizes[0])]
    )
    for axis, (position, log_probs) in enumerate(zip((here, there), laws, strict=True)):
        masses = np.zeros(sizes[axis])
        for token, value in log_probs.items():
            masses[position.index.get(token, -1)] += math.exp(value)
        assert np.tensordot(masses, factors, (0, axis)).max() <= 1 + 1e-9


def test_pair_by_hand():
    position = Position.read({"a": math.log(0.75), "b": math.log(0.25)}, 4)
    equal, different = (pair_log_factors(position, position, 0, second) for second in (0, 1))
    assert math.exp(equal[4]) == pytest.approx(0.5 + 0.5 / 0.75, abs=1e-5)  # half of the pairs are equal
    assert math.exp(different[4]) == pytest.approx(0.5, abs=1e-5)
    assert math.exp(different[8]) == pytest.approx(1 + 0.5 * (0.25 / 0.75), abs=1e-5)
    assert math.exp(equal[8]) == pytest.approx(1 - 0.5 * (0.25 / 0.75) ** 2, abs=1e-5)


def test_shared_random_numbers_are_found_and_independent_ones_are_not():
    honest, equal, some, uniform = (IndependenceTest(0.005, LISTED) for _ in range(4))
    rng = random.Random(8)
    for number in range(400):
        log_probs, others = law(number), law(number, exponent=1.6)
        first, second = draw(rng, log_probs), draw(rng, log_probs)
        copied = first if rng.random() < 0.2 else second
        honest.observe(first, top(log_probs), second, top(log_probs))
        equal.observe(first, top(log_probs), first, top(log_probs))
        some.observe(first, top(log_probs), copied, top(log_probs))
        point = rng.random()  # the same point of the line of probabilities, in other contexts
        tokens = [
            next(
                t
                for t, mass in zip(p, itertools.accumulate(map(math.exp, p.values())), strict=True)
                if mass > point
            )
            for p in ({**log_probs, "end": 0.0}, {**others, "end": 0.0})
        ]
        uniform.observe(tokens[0], top(log_probs), tokens[1], top(others))
    assert not honest.rejected
    assert equal.num_tokens_until_rejected < 10
    assert some.num_tokens_until_rejected < 400
    assert uniform.num_tokens_until_rejected < 100
    assert "recycled" in equal.strongest()


def test_pairs_with_hidden_or_unknown_cells_are_left_out():
    cells = {"a": -1.0, "b": -1.5, "c": -2.0, "</s>": -3.0}
    test = IndependenceTest(0.005, 20, {"</s>"})
    test.observe("</s>", cells, "a", cells)
    assert test.num_tokens == 0
    test.observe("a", cells, "b", cells)
    assert (test.num_tokens, test.num_unreadable, test.log_e_value) == (1, 1, 0.0)
