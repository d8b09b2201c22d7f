"""Predictions of a head with fewer outputs than the target has tokens equal those over all tokens."""

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.core.drafter import DraftFormat
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.speculation.predictions import draw_temperature
from services.speculation.predictor import DraftModel, Predictor

VOCAB, OUTPUTS, FIRST, ROWS = 2000, 300, 7, 40
IDS = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:OUTPUTS].sort().values
REDUCED = DraftFormat(VOCAB, None, IDS)


class Engine:
    """A head whose logits the tests give."""

    @staticmethod
    def keep_reduced():
        return REDUCED


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.7, "logit_bias": {int(IDS[3]): 4.0, int(IDS[5]): -3.0}},
    ],
    ids=lambda given: " ".join(given),
)
def test_choices_and_confidences_are_those_over_all_tokens(params):
    params = SamplingParams(seed=5, **params)
    session = SessionCopy("s", 1, SessionSpec(params, VerificationMethod.COUPLED, FIRST, ()))
    session.noise = Noise(5, 0, VOCAB)
    logits = 3 * torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(2))
    positions = range(FIRST, FIRST + ROWS)
    made = Predictor(DraftModel(Engine()), session).predict(logits, positions, lambda: [[]] * ROWS)
    every = REDUCED.with_all_tokens(logits)
    for token_id, bias in params.logit_bias.items():
        every[:, token_id] += bias
    scores = processed_log_probs(every, params) + session.noise.gumbel(FIRST, ROWS)
    shares = (scores / draw_temperature(params.temperature)).softmax(-1)
    assert [one.choose(FIRST) for one in made] == scores.argmax(-1).tolist()
    for prediction, row in zip(made, shares, strict=True):
        best = row.topk(3)
        found = prediction.guesses(FIRST)[:3]
        known = [(i, p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True) if p > 0]
        assert [token_id for token_id, _ in found[: len(known)]] == [token_id for token_id, _ in known]
        for (_, share), (_, expected) in zip(found, known, strict=False):
            assert share == pytest.approx(expected, abs=1e-4)
