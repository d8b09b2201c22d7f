"""From measurements to a judgement: obstacles, losses, gains, and their messages."""

import math

import pytest

from gammaray.maths import theory
from gammaray.qualify.judgement import Fitness, has_other_vocabulary, judge
from gammaray.qualify.measured import Decision, Overlap, check_gamma
from tests.support.qualify_helpers import facts, pair, plain_run, run, same


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (facts(refusal="it flies"), facts(), ["the target cannot be served: it flies"]),
        (facts(), facts(refusal="it swims"), ["the draft cannot be served: it swims"]),
        (
            facts(),
            facts(vocab_size=97, tokenizer_sha256=""),
            ["100 token ids of the target, 97 of the draft", "no tokenizer"],
        ),
        (
            facts(refusal="it flies"),
            facts(vocab_size=97, tokenizer_sha256=""),
            ["it flies", "97 of the draft"],
        ),
    ],
    ids=["target", "draft", "vocabulary", "both"],
)
def test_pair_that_cannot_be_served_is_unfit_for_every_reason(target, draft, words):
    judgement = judge(pair(target=target, draft=draft, equality=()))
    assert judgement.fitness is Fitness.UNFIT
    assert judgement.payoffs == ()
    assert judgement.best_speedup == 0
    assert all(word in " / ".join(judgement.reasons) for word in words)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, False),
        ({"tokenizer_sha256": ""}, False),
        ({"vocab_size": 0}, False),
        ({"vocab_size": 97}, True),
        ({"tokenizer_sha256": "other"}, True),
    ],
)
def test_vocabularies_differ_by_size_or_by_tokens(changed, expected):
    assert has_other_vocabulary(facts(), facts(**changed)) is expected


def test_pair_with_another_vocabulary_is_judged_with_a_note_on_the_overlap():
    overlap = Overlap(shared=60, prompt_share=0.4)
    measured = pair([plain_run(), run(4)], draft=facts("d", vocab_size=97, tokenizer_sha256="other"))
    judgement = judge(measured.model_copy(update={"overlap": overlap}))
    assert judgement.fitness is Fitness.FIT
    (note,) = judgement.warnings
    assert "100 token ids of the target, 97 of the draft" in note
    assert "60 of the target's tokens, 40% of those of the prompts" in note
    assert "alpha is 0.40 at most" in note


def test_pair_that_pays_is_fit_and_its_figures_are_those_of_the_theory():
    judgement = judge(pair([plain_run(), run(2), run(4), run(8)]), min_speedup=1.5)
    assert judgement.fitness is Fitness.FIT
    assert judgement.warnings == ()
    (payoff,) = judgement.payoffs
    assert math.isclose(payoff.alpha, 0.8, rel_tol=1e-2)
    assert payoff.by_position == pytest.approx([0.8] * 8, rel=1e-2)
    assert (payoff.plain_ms, payoff.draft_step_ms) == (10.0, 1.0)
    for depth in payoff.depths:
        assert depth.speedup == pytest.approx(theory.speedup(0.8, depth.gamma, 0.1), rel=1e-2)
    assert payoff.best.gamma == 8
    assert judgement.best_speedup == payoff.best.speedup
    assert "pays" in judgement.reasons[0]


def test_network_slows_measured_and_predicted_alike():
    runs = [plain_run(), run(2), run(4), run(8)]
    (near,), (far,) = judge(pair(runs)).payoffs, judge(pair(runs), rtt_ms=5.0).payoffs
    for before, after in zip(near.depths, far.depths, strict=True):
        assert after.cycle_ms == before.cycle_ms + 5.0
        assert after.speedup < before.speedup


def test_pair_that_does_not_pay_is_slower():
    judgement = judge(pair([plain_run(), run(2, alpha=0.2, step_ms=6.0), run(4, alpha=0.2, step_ms=6.0)]))
    assert judgement.fitness is Fitness.SLOWER
    assert "does not pay" in judgement.reasons[0]


def test_pair_that_pays_at_one_temperature_is_fit_with_a_warning_about_the_other():
    runs = [
        *(plain_run(), run(4)),
        *(plain_run(1.0), run(4, alpha=0.2, temperature=1.0, step_ms=6.0)),
    ]
    judgement = judge(pair(runs, [same(), same(1.0)]))
    assert judgement.fitness is Fitness.FIT
    assert len(judgement.reasons) == 1
    assert judgement.reasons[0].startswith("temperature 0:")
    assert len(judgement.warnings) == 1
    assert judgement.warnings[0].startswith("temperature 1: speculation does not pay")


def test_verdict_follows_the_minimum_speedup():
    pays = judge(pair([plain_run(), run(4)])).best_speedup
    assert judge(pair([plain_run(), run(4)]), min_speedup=pays).fitness is Fitness.FIT
    assert judge(pair([plain_run(), run(4)]), min_speedup=pays + 0.01).fitness is Fitness.SLOWER


def test_different_tokens_make_a_pair_unfit_at_any_speed():
    lossy = same(equal=6, ties=1, first="with gamma 4 prompt 2 diverges from plain decoding at token 7")
    judgement = judge(pair([plain_run(), run(4)], [lossy]))
    assert judgement.fitness is Fitness.UNFIT
    assert judgement.reasons == (f"not lossless at temperature 0: {lossy.first}",)
    assert judgement.payoffs  # what was measured is shown all the same


def test_ties_missing_tokenizer_and_short_context_are_warnings():
    draft = facts(tokenizer_sha256="", max_context=64)
    judgement = judge(pair([plain_run(), run(4)], [same(equal=7, ties=1)], draft=draft))
    assert judgement.fitness is Fitness.FIT
    text = " / ".join(judgement.warnings)
    assert all(word in text for word in ("no tokenizer", "64 tokens", "1 of 8 completions diverge"))


def test_few_tested_tokens_are_a_warning():
    judgement = judge(pair([plain_run(), run(2, cycles=20)]))
    assert any("tested tokens only" in warning for warning in judgement.warnings)


@pytest.mark.parametrize(
    "runs",
    [
        [plain_run(ms=None), run(2)],
        [plain_run()],
        [plain_run(), run(2, verify_ms=None)],
    ],
    ids=["no plain time", "no speculation", "no whole proposal"],
)
def test_pair_without_timings_is_not_fit(runs):
    judgement = judge(pair(runs))
    assert judgement.fitness is Fitness.SLOWER
    assert judgement.payoffs == ()
    assert "no proposal had full length" in judgement.reasons[0]


def test_gamma_out_of_bounds_is_refused():
    assert check_gamma(64) == 64
    for gamma in (0, 65):
        with pytest.raises(ValueError, match="1 to 64"):
            check_gamma(gamma)


@pytest.mark.parametrize(("pays", "fitness"), [(True, Fitness.FIT), (False, Fitness.SLOWER)])
def test_decision_of_the_sequential_test_is_the_judgement(pays, fitness):
    few = pair([plain_run(), run(4, cycles=20)])  # too few tokens to be trusted without a test
    decisions = (Decision(temperature=0.0, pays=pays, error=0.01),)
    judgement = judge(few.model_copy(update={"decisions": decisions}))
    assert judgement.fitness is fitness
    assert "wrong with a probability of at most 0.01" in judgement.reasons[0]
    assert judgement.warnings == ()


def test_pair_without_a_certain_decision_is_judged_by_its_figures_with_a_note():
    measured = pair([plain_run(), run(4)])
    decisions = (Decision(temperature=0.0, pays=None, error=0.01),)
    judgement = judge(measured.model_copy(update={"decisions": decisions}))
    assert judgement.fitness is Fitness.FIT
    assert "probability" not in judgement.reasons[0]
    (note,) = judgement.warnings
    assert "not certain (error 0.01)" in note


def test_network_time_does_not_apply_in_the_target_worker():
    there = pair([plain_run(), run(4)])
    here = there.model_copy(update={"is_local": True})
    assert judge(there, rtt_ms=50.0).fitness is Fitness.SLOWER
    assert judge(here, rtt_ms=50.0).payoffs == judge(there).payoffs
    assert judge(here, rtt_ms=50.0).fitness is Fitness.FIT
