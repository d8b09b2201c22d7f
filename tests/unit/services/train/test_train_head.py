"""`gammaray train` on the demo target: a head: learns, resumes, and serves what it predicted."""

import json
import re

import pytest
import torch

from services.demo_pair import TARGET_DIR
from services.engine.core.batch import SequenceInput
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from services.heads.loading import load_head
from services.heads.runner import head_engine
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore
from services.train.head import TrainableHead
from services.train.run import run
from tests.support.train_helpers import losses, make_task, overlaps, run_until

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

NUM_LAYERS = 16
TAPS = (2, 8, 13, NUM_LAYERS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A head after some steps: its folder, and what was told before and after an interruption."""
    folder = tmp_path_factory.mktemp("head")
    first, done = run_until(make_task(folder), "steps 15 ")
    assert not done
    elapsed_s = json.loads((folder / "work" / "elapsed.json").read_text())
    second = []
    # In the second half of the time, in which a head is trained in several steps.
    assert run(make_task(folder, minutes=(elapsed_s + 10) / 60), second.append, lambda: False)
    return folder, first, second


def test_training_learns_and_resumes(trained):
    folder, first, second = trained
    assert re.match("continues at step 1[56]", second[0])
    assert losses(second)[-1] < losses(first)[0]
    assert overlaps(second)[-1][0] > overlaps(first)[0][0] + 0.05
    config = json.loads((folder / "drafter" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == list(TAPS)
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(TAPS)
    assert config["draft_vocab_size"] == 512


def test_head_serves_what_was_trained(trained, tmp_path):
    """Its logits in the engine, on the target's tapped states, are those of the unrolled training."""
    folder, _, _ = trained
    head, target_ids = load_head(str(folder / "drafter"), str(TARGET_DIR))
    store = AnswerStore(folder / "work" / "answers")
    sequence = next(one for one in store.sequences() if len(one.token_ids) - one.num_prompt > 12)
    target = load_model(str(TARGET_DIR), device="cpu", dtype="float32").module
    states = StateStore(tmp_path, target, TAPS)  # training computes them in bfloat16
    drafter = TrainableHead(target, TAPS, target_ids, states.of)
    drafter.module.load_state_dict(
        {key: value for key, value in head.state_dict().items() if "embed_tokens" not in key}
    )
    drafter.eval()
    batch = drafter.batch([sequence], 3)
    with torch.no_grad():
        expected = drafter(batch)

    engine = load_engine(str(TARGET_DIR))
    engine.tap(TAPS)
    token_ids = sequence.token_ids.tolist()
    engine.step([SequenceInput("t", 0, token_ids, 1)])
    serving = head_engine(head, target_ids, name="head", max_context=512)
    serving.keep_reduced()
    features = serving.fuse(engine.taps[0])

    def served(anchor, depth, features):
        serving.release("s")
        serving.skip("s", token_ids[:1])
        feed = SequenceInput("s", 1, token_ids[1 : anchor + 1], 1, features=features[:anchor])
        made = serving.step([feed])[0]
        for position in range(anchor + 1, anchor + depth):
            made = serving.step([SequenceInput("s", position, [token_ids[position]], 1)])[0]
        return made[0].log_softmax(-1)

    chosen = list(zip(batch.place.tolist(), expected, strict=True))[::7]
    assert {depth for (_, _, depth), _ in chosen} == {1, 2, 3}
    # Stored states are rounded to bfloat16.
    assert all(
        (served(anchor, depth, features) - rows).abs().max() < 0.05 for (_, anchor, depth), rows in chosen
    )
    for shift in (1, -1):  # features of the position before or after
        assert any(
            (served(anchor, depth, features.roll(shift, 0)) - rows).abs().max() > 0.2
            for (_, anchor, depth), rows in chosen
        )
