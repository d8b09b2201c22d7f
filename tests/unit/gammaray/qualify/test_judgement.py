"""From measurements to a judgement: obstacles, losses, gains, and their messages."""

import pytest

from gammaray.qualify.judgement import Fitness, judge
from tests.support.qualify_helpers import depth, facts, pair, trial


def test_pair_that_cannot_be_served_is_unfit_for_every_reason():
    judgement = judge(pair(target=facts(refusal="it flies"), draft=facts(refusal="it swims")), 1.0)
    assert judgement.fitness is Fitness.UNFIT
    assert judgement.reasons == (
        "the target cannot be served: it flies",
        "the draft cannot be served: it swims",
    )
    assert judgement.best_speedup == 0


def test_pair_with_another_vocabulary_is_judged_with_a_note_on_what_is_shared():
    judgement = judge(pair(trial(depth(4)), shared=0.4), 1.0)
    assert judgement.fitness is Fitness.FIT
    assert judgement.warnings == (
        "the vocabularies differ: the draft has 40% of the prompts' tokens, so alpha is 0.40 at most on such "
        "text",
    )


def test_pair_that_pays_is_fit_by_its_best_depth():
    measured = trial(depth(2), depth(4), depth(8))
    judgement = judge(pair(measured), 1.5)
    assert judgement.fitness is Fitness.FIT
    assert judgement.warnings == ()
    assert measured.alpha == pytest.approx(0.8)
    assert measured.best.gamma == 8
    assert judgement.best_speedup == measured.best.speedup
    assert "pays" in judgement.reasons[0]


def test_pair_that_does_not_pay_is_slower():
    judgement = judge(pair(trial(depth(2, alpha=0.2, step_ms=6.0))), 1.0)
    assert judgement.fitness is Fitness.SLOWER
    assert "does not pay" in judgement.reasons[0]


def test_pair_that_pays_at_one_temperature_is_fit_with_a_warning_about_the_other():
    judgement = judge(pair(trial(depth(4)), trial(depth(4, alpha=0.2, step_ms=6.0), temperature=1.0)), 1.0)
    assert judgement.fitness is Fitness.FIT
    (reason,), (warning,) = judgement.reasons, judgement.warnings
    assert reason.startswith("temperature 0:")
    assert warning.startswith("temperature 1: speculation does not pay")


def test_verdict_follows_the_minimum_speedup():
    measured = pair(trial(depth(4)))
    pays = judge(measured, 1.0).best_speedup
    assert judge(measured, pays).fitness is Fitness.FIT
    assert judge(measured, pays + 0.01).fitness is Fitness.SLOWER


def test_different_tokens_make_a_pair_unfit_at_any_speed():
    divergence = "with gamma 4 prompt 2 diverges from plain decoding at token 7"
    judgement = judge(pair(trial(depth(4), equal=6, ties=1, divergence=divergence)), 1.0)
    assert judgement.fitness is Fitness.UNFIT
    assert judgement.reasons == (f"not lossless at temperature 0: {divergence}",)


def test_ties_and_short_context_are_warnings():
    judgement = judge(pair(trial(depth(4), equal=7, ties=1), draft=facts(max_context=64)), 1.0)
    assert judgement.fitness is Fitness.FIT
    text = " / ".join(judgement.warnings)
    assert all(word in text for word in ("64 tokens", "1 of 8 completions diverge"))


def test_few_tested_tokens_are_a_warning():
    judgement = judge(pair(trial(depth(2), tested=(20, 16), accepted=(16, 12))), 1.0)
    assert any("36 tested tokens only" in warning for warning in judgement.warnings)


def test_pair_without_timings_is_not_fit():
    judgement = judge(pair(trial(plain_ms=None)), 1.0)
    assert judgement.fitness is Fitness.SLOWER
    assert "no proposal had full length" in judgement.reasons[0]
