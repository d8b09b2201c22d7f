"""Noise of many sessions at once: what GPUs compute without a cache is what `Noise` gives."""

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from services.scheduling.tasks import SessionSpec
from services.vllm.noise import NoiseRows, NoiseSource

VOCAB = 1_001
SESSIONS = [(5, 0, 0), (2**63 + 17, 3, 77), (2**64 - 1, 2**24 - 1, 100_000), (0, 1, 1)]
"""Seed, sample index and first position."""


def spec(seed: int, index: int) -> SessionSpec:
    params = SamplingParams(temperature=1.0, seed=seed, sample_index=index)
    return SessionSpec(params, VerificationMethod.COUPLED, 1, ())


@pytest.fixture(params=[False, True], ids=["cached", "computed"])
def source(request):
    """The noise of CPUs, and the function of GPUs as torch runs it before it is compiled."""
    return NoiseSource(VOCAB, torch.device("cpu"), is_computed=request.param)


def test_rows_of_many_sessions_are_those_of_each(source):
    wanted = [
        NoiseRows(str(seed), spec(seed, index), start, 1 + number)
        for number, (seed, index, start) in enumerate(SESSIONS)
    ]
    expected = [
        Noise(seed, index, VOCAB).gumbel(start, 1 + number)
        for number, (seed, index, start) in enumerate(SESSIONS)
    ]
    assert torch.equal(source.gumbel(wanted), torch.cat(expected))


def test_noise_of_one_session_has_all_streams(source):
    for seed, index, start in SESSIONS:
        noise, expected = source.of(str(seed), spec(seed, index)), Noise(seed, index, VOCAB)
        assert torch.equal(noise.gumbel(start, 3), expected.gumbel(start, 3))
        assert torch.equal(noise.independent_gumbel(start, 2), expected.independent_gumbel(start, 2))
        assert torch.equal(noise.residual_gumbel(start), expected.residual_gumbel(start))
        assert noise.accept_uniform(start, 1) == expected.accept_uniform(start, 1)


def test_a_session_with_another_seed_has_its_noise(source):
    for seed in (1, 2, 1):
        assert torch.equal(source.of("one", spec(seed, 0)).gumbel(5, 2), Noise(seed, 0, VOCAB).gumbel(5, 2))
    assert source.num_sessions == 1
    source.forget("one")
    assert source.num_sessions == 0
