"""What a head is trained on: the states of the forwards that wrote the answers."""

from functools import partial

import pytest
import torch

from services.demo_pair import TARGET_DIR
from services.engine.loader import load_engine
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore
from tests.support.train_helpers import make_task, run_until

TAPS = (2, 8, 13, 16)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of a run of one step, with a head of twice the size up to which the rate is constant."""
    folder = tmp_path_factory.mktemp("states")
    task = make_task(folder, tokens=300, max_tokens=24, steps_per_report=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.train.trainable._LARGE", load_engine(str(TARGET_DIR)).runner.hidden_size / 2)
        run_until(task, "steps 1 ")
    return folder / "work"


def test_they_are_those_of_the_whole_text(work, tmp_path):
    answers = list(AnswerStore(work / "answers").sequences())
    written = StateStore(work / "states", lambda: pytest.fail("computed again"), TAPS).of(answers)
    computed = StateStore(tmp_path, partial(load_engine, str(TARGET_DIR)), TAPS).of(answers)
    assert len(answers) > 10
    for answer, own, other in zip(answers, written, computed, strict=True):
        assert own.shape == other.shape == (len(answer.token_ids), len(TAPS), own.shape[-1])
        distance = (own - other)[:-1].float().norm(dim=(0, 2)) / other[:-1].float().norm(dim=(0, 2))
        assert (distance < 0.03).all(), distance


def test_the_rate_falls_with_the_square_of_the_size(work):
    (group,) = torch.load(work / "state.pt", weights_only=True)["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.001 / 4 * 2 / 40)  # the second of 40 steps of warming up
