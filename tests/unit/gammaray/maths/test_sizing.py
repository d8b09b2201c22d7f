"""`gammaray size`: equal to the cost model, and monotone."""

import math

import pytest
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.errors import InvalidArgumentError
from gammaray.maths import theory
from gammaray.maths.sizing import MAX_GAMMA, Sizing

L4_H100 = Sizing(alpha=0.75, target_ms=20.0, draft_ms=2.0, rtt_ms=0.5, sessions=64, draft_tokens=16)


# alpha, sessions, best gamma, gain in throughput (arXiv 2406.14066); draft cost .05, saturation at 256 tokens
GOODPUT = [
    (0.8, 1, 8, 3.09),
    (0.8, 32, 7, 3.08),
    (0.8, 64, 3, 2.57),
    (0.8, 128, 1, 1.71),
    (0.8, 256, 0, 1.0),
    (0.6, 32, 4, 1.92),
    (0.6, 256, 0, 1.0),
    (0.9, 1, 13, 4.67),
    (0.9, 64, 3, 2.99),
]


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("latency", [0.0, 0.05, 1.0])
def test_one_session_matches_the_theory(alpha, cost, latency):
    sizing = Sizing(alpha=alpha, target_ms=10.0, draft_ms=10.0 * cost, rtt_ms=2 * latency * 10.0)
    choice = sizing.choose(1)
    assert choice.gamma == theory.optimal_gamma(alpha, cost, latency, max_gamma=MAX_GAMMA)
    assert math.isclose(choice.speedup, theory.speedup(alpha, choice.gamma, cost, latency))


@pytest.mark.parametrize(("alpha", "sessions", "gamma", "gain"), GOODPUT)
def test_many_sessions_match_the_literature(alpha, sessions, gamma, gain):
    choice = Sizing(alpha=alpha, target_ms=10.0, draft_ms=0.5, sessions=sessions).choose(1)
    assert choice.gamma == gamma
    assert choice.speedup == pytest.approx(gain, abs=5e-3)


def test_without_drafters_it_is_plain_decoding():
    choice = L4_H100.choose(0)
    assert (choice.gamma, choice.speedup, choice.value) == (0, 1.0, 1.0)
    assert math.isclose(choice.tokens_per_s, 64 * 1000 / 20)


def test_more_drafters_never_slow_down_and_pay_less_and_less():
    rates = [L4_H100.choose(number).tokens_per_s for number in range(9)]
    assert rates == sorted(rates)
    assert rates[4] > 1.05 * rates[1]  # 64 sessions are more than one drafter takes at once
    assert rates[8] == rates[4]  # and four take them all


def test_best_number_has_the_most_tokens_per_price():
    best = L4_H100.best(8)
    assert best.value == max(L4_H100.choose(number).value for number in range(9))
    assert 1 <= best.drafters <= 4


def test_drafters_that_do_not_pay_are_not_recommended():
    assert Sizing(alpha=0.1, target_ms=10.0, draft_ms=5.0).best().drafters == 0
    assert Sizing(alpha=0.5, target_ms=10.0, draft_ms=4.0, draft_price=5.0).best().drafters == 0


def test_break_even_is_where_the_speedup_is_one():
    limit = L4_H100.break_even_rtt_ms(2)
    at, beyond = (
        Sizing(alpha=0.75, target_ms=20.0, draft_ms=2.0, rtt_ms=rtt, sessions=64, draft_tokens=16).choose(2)
        for rtt in (0.99 * limit, 1.01 * limit)
    )
    assert at.speedup > 1.0 >= beyond.speedup
    assert Sizing(alpha=0.0, target_ms=1.0, draft_ms=1.0).break_even_rtt_ms(1) == 0.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("alpha", 1.0), ("alpha", float("nan")), ("target_ms", 0.0), ("draft_ms", -1.0)),
        *(("rtt_ms", -0.1), ("sessions", 0), ("draft_tokens", 0), ("draft_price", -1.0)),
    ],
)
def test_value_out_of_bounds_is_refused_by_name(field, value):
    given = {"alpha": 0.5, "target_ms": 1.0, "draft_ms": 1.0, field: value}
    with pytest.raises(InvalidArgumentError, match=field):
        Sizing(**given)


def test_command_prints_three_tables():
    result = CliRunner().invoke(main, ["size", "--alpha=0.75", "--target-ms=20", "--draft-ms=2"])
    assert result.exit_code == 0, result.output
    for title in ("Drafters per target", "Speedup by draft pass", "Speedup by network time"):
        assert title in result.output
    assert result.output.count("<- best") == 1


def test_command_refuses_by_name():
    result = CliRunner().invoke(main, ["size", "--alpha=1.5", "--target-ms=20", "--draft-ms=2"])
    assert result.exit_code == 2
    assert "alpha" in result.output
