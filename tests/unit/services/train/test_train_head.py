"""`gammaray train` on the demo target: a head: learns and resumes."""

import json
import re

import pytest

from services.train.run import run
from tests.support.train_helpers import losses, make_task, overlaps, run_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NUM_LAYERS = 16
TAPS = (2, 8, 13, NUM_LAYERS)


def test_training_learns_and_resumes(tmp_path):
    first, done = run_until(make_task(tmp_path), "steps 15 ")
    assert not done
    elapsed_s = json.loads((tmp_path / "work" / "elapsed.json").read_text())
    second = []
    # In the second half of the time, in which a head is trained in several steps.
    assert run(make_task(tmp_path, minutes=(elapsed_s + 10) / 60), second.append, lambda: False)
    assert re.match("continues at step 1[56]", second[0])
    assert losses(second)[-1] < losses(first)[0]
    assert overlaps(second)[-1][0] > overlaps(first)[0][0] + 0.05
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(TAPS)
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(TAPS)
    assert config["draft_vocab_size"] == 512
