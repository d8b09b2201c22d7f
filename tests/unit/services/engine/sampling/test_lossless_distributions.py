"""Sampled losslessness: the first two tokens of whole cycles against the target's exact distribution."""

import dataclasses
from collections import Counter

import pytest

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from tests.support.maths_loop_helpers import Speculator, TableModel, chain_of, exact_joint, g_test

pytestmark = pytest.mark.statistical

VOCAB, SAMPLES, STRIDE = 5, 4000, 8
FAIR, BIASED = 1e-3, 1e-6
SETTINGS = {
    "temperature_1": SamplingParams(),
    "top_p": SamplingParams(temperature=0.9, top_p=0.97),
    "penalties": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=-0.4),
}


def speculator(method, params):
    target = TableModel(VOCAB, 3, 1.3)
    return Speculator(method, target, target.blurred(4, 0.8), params, Noise(13, 0, VOCAB))


def counts_of(speculation):
    counts = Counter()
    for sample in range(SAMPLES):
        speculation.offset = sample * STRIDE
        counts[speculation.generate(2, chain_of(2))] += 1
    return [counts[first, second] for first in range(VOCAB) for second in range(VOCAB)]


@pytest.mark.slow
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("method", list(VerificationMethod))
def test_generation_follows_the_target_distribution(method, params):
    speculation = speculator(method, params)
    distribution = exact_joint(speculation)
    assert g_test(counts_of(speculation), distribution) > FAIR


@pytest.mark.slow
@pytest.mark.parametrize("method", list(VerificationMethod))
def test_generation_with_a_planted_two_per_cent_bias_is_caught(method):
    """The rows that verify gets are changed, the expected distribution is not."""
    honest = speculator(method, SETTINGS["temperature_1"])
    biased = dataclasses.replace(honest, bias=0.02, known={})
    assert g_test(counts_of(biased), exact_joint(honest)) < BIASED
