"""`gammaray train` on the demo target: learns, stops and resumes, refuses what does not fit."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from services.demo_pair import TARGET_DIR
from services.process.fingerprints import vocab_sha256
from services.train.answers.store import AnswerStore
from services.train.run import run
from tests.support.engine_helpers import tiny_model
from tests.support.train_helpers import PROMPTS, losses, make_sequence, make_task, overlaps, run_until


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A draft model after some steps: its folder, and what was told before and after an interruption."""
    folder = tmp_path_factory.mktemp("draft")
    task = make_task(folder, kind="plain")
    first, done = run_until(task, "steps 15 ")
    assert not done
    tokens = AnswerStore(folder / "work" / "answers").num_answer_tokens
    second, _ = run_until(task, "steps 45 ")
    assert AnswerStore(folder / "work" / "answers").num_answer_tokens == tokens
    return folder, first, second


@pytest.mark.slow
def test_training_learns_and_resumes(trained):
    folder, first, second = trained
    assert re.match("continues at step 1[56]", second[0])
    assert losses(second)[-1] < losses(first)[0]
    assert overlaps(second)[-1][0] > overlaps(first)[0][0] + 0.05
    config = json.loads((folder / "drafter" / "config.json").read_text())
    weights = load_file(folder / "drafter" / "model.safetensors")
    described = json.loads((folder / "drafter" / "gammaray.json").read_text())
    assert config["draft_vocab_size"] == len(weights["lm_head.weight"]) == len(weights["d2t"]) == 512
    assert "model.embed_tokens.weight" not in weights
    assert described["tokenizer"]["fingerprint"] == vocab_sha256(str(TARGET_DIR))


@pytest.mark.slow
def test_training_starts_from_another_drafter(trained, tmp_path):
    folder, _, taught = trained
    shutil.copytree(folder / "work" / "answers", tmp_path / "work" / "answers")
    begun, _ = run_until(make_task(tmp_path, kind="plain", init=str(folder / "drafter")), "steps 0 ")
    # The same answers are held out, by the seed; weights are stored in half the precision.
    assert overlaps(begun)[0][0] == pytest.approx(max(overlaps(taught))[0], abs=0.02)


@pytest.mark.slow
def test_another_shape_or_target_is_refused(trained, tmp_path):
    folder, _, _ = trained
    with pytest.raises(FailedPreconditionError, match="shape"):
        run(make_task(folder, kind="plain", layers="1"), print, lambda: False)
    other = tiny_model("llama", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((TARGET_DIR / name).read_bytes())
    with pytest.raises(FailedPreconditionError, match="target"):
        run(make_task(folder, target=str(other)), print, lambda: False)


def test_drafter_starts_from_the_named_layers(tmp_path):
    # Every fourth layer of the demo target: those that it was grown from, so that they alone agree with it.
    task = make_task(tmp_path, kind="plain", layers="0,4,8,12", draft_vocab=2048)
    first, _ = run_until(task, "steps 0 ")
    assert overlaps(first)[0][0] > 0.8


def test_killed_write_loses_only_its_own_sequence(tmp_path):
    store = AnswerStore(tmp_path)
    store.append(make_sequence(0, 2, 4))
    (tmp_path / ".1-9-2-0.npz.new").write_bytes(b"half")
    again = AnswerStore(tmp_path)
    assert (again.jobs, again.num_answer_tokens) == ({0}, 4)
    again.append(make_sequence(1, 2, 7))
    assert [len(found.token_ids) for found in again.sequences()] == [6, 9]


@pytest.mark.parametrize("prompts", [(), PROMPTS])
def test_target_without_chat_template_is_refused(tmp_path, prompts):
    target = tmp_path / "target"
    target.mkdir()
    for file in TARGET_DIR.iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (target / file.name).write_bytes(file.read_bytes())
    with pytest.raises(FailedPreconditionError, match="no chat template"):
        run(make_task(tmp_path, target=str(target), prompts=prompts, chat=True), print, lambda: False)


@pytest.mark.parametrize("layers", ["16", "2,16"])
def test_layers_that_the_target_lacks_are_refused(tmp_path, layers):
    with pytest.raises(InvalidArgumentError, match=r"layers: .* from 0 to 15"):
        run(make_task(tmp_path, kind="plain", layers=layers), print, lambda: False)
