"""What a head is trained on: the states of the forwards that wrote the answers."""

import pytest
import torch

from services.demo_pair import TARGET_DIR
from services.engine.loader import load_engine
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore
from tests.support.train_helpers import make_task, run_until


def test_states_are_those_of_the_whole_text_and_a_large_head_learns_at_a_lower_rate(tmp_path, monkeypatch):
    engine, taps, work = load_engine(str(TARGET_DIR)), (2, 8, 13, 16), tmp_path / "work"
    monkeypatch.setattr("services.train.trainable._LARGE", engine.runner.hidden_size / 2)
    run_until(make_task(tmp_path, tokens=300, max_tokens=24, steps_per_report=1), "steps 1 ")
    answers = list(AnswerStore(work / "answers").sequences())
    assert len(answers) > 10
    written = StateStore(work / "states", lambda: pytest.fail("computed again"), taps).of(answers)
    computed = StateStore(tmp_path, lambda: engine, taps).of(answers)
    for answer, own, other in zip(answers, written, computed, strict=True):
        assert own.shape == other.shape == (len(answer.token_ids), len(taps), own.shape[-1])
        distance = (own - other)[:-1].float().norm(dim=(0, 2)) / other[:-1].float().norm(dim=(0, 2))
        assert (distance < 0.03).all(), distance
    (group,) = torch.load(work / "state.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.001 / 4 * 2 / 40)  # the second of 40 steps of warming up
