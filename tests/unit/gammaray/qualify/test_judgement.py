"""From measurements to a judgement: losses, gains, and their messages."""

import pytest

from gammaray.qualify.judgement import MIN_CYCLES, Fitness, judge
from tests.support.qualify_helpers import result, row


def test_candidate_that_pays_is_fit_by_its_best_depth():
    judgement = judge(result(row(2, 1.2), row(4, 1.6), row(8, 1.4)), 1.5, is_exact=True)
    assert judgement.fitness is Fitness.FIT
    assert judgement.reasons == (
        "temperature 0: speculation pays: 1.60x of plain decoding at its best, gammaray-4, with alpha 0.80; "
        "asked for is 1.5x",
    )
    assert (judgement.warnings, judgement.best_speedup) == ((), 1.6)


def test_candidate_that_pays_at_one_temperature_is_fit_with_a_note_on_the_other():
    found = {"points": result(row(2, 1.3))["points"] + result(row(2, 0.9), temperature=1)["points"]}
    judgement = judge(found, 1.1, is_exact=True)
    assert (judgement.fitness, judgement.best_speedup) == (Fitness.FIT, 1.3)
    assert "temperature 1: speculation does not pay: 0.90x" in judgement.warnings[0]


def test_candidate_that_does_not_pay_is_slower():
    judgement = judge(result(row(2, 0.9), row(4, 0.8)), 1.0, is_exact=True)
    assert (judgement.fitness, judgement.best_speedup) == (Fitness.SLOWER, 0.9)
    assert "does not pay: 0.90x" in judgement.reasons[0]


@pytest.mark.parametrize("is_exact", [True, False])
def test_other_tokens_are_a_loss_where_arithmetic_is_exact(is_exact):
    judgement = judge(result(row(2, 2.0), equal=9), 1.0, is_exact=is_exact)
    told = "temperature 0: 1 of 10 completions differ from plain decoding"
    assert judgement.fitness is (Fitness.UNFIT if is_exact else Fitness.FIT)
    assert told in (judgement.reasons if is_exact else judgement.warnings)


def test_few_cycles_are_said():
    judgement = judge(result(row(2, 2.0, cycles=MIN_CYCLES - 1, alpha=None)), 1.0, is_exact=True)
    assert f"alpha is from {MIN_CYCLES - 1} cycles only" in judgement.warnings[0]
    assert "with alpha unknown" in judgement.reasons[0]
