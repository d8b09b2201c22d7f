"""What a tenant's drafter learns of a secret in the tenant's streams, and what those of others do."""

import pytest
from safetensors.torch import load_file

from gammaray.learning.folder import LearningFolder
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.learning.records import Buffer, Recorder
from services.train.live.trainer import Trainer
from tests.support.engine_helpers import random_tokens
from tests.support.learning_helpers import TAPS, ended, new_head

SECRET = random_tokens(24, seed=77, vocab_size=97)
PROMPT = random_tokens(12, seed=78, vocab_size=97)


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 300)
    monkeypatch.setattr("services.train.live.trainer.RATE", 3e-3)
    monkeypatch.setattr("services.train.live.trainer.MIN_GAIN", 0.0)


def stream(seed):
    return PROMPT + random_tokens(60, seed=seed, vocab_size=97)


def write(folder, target, streams):
    """Write streams of tenants, which agree."""
    path, engine, recorder = folder.path, load_engine(str(target)), Recorder()
    engine.tap(TAPS)
    for tenant, texts in streams.items():
        folder.consent(tenant, "own")
        for number, tokens in enumerate(texts):
            session, buffer = ended(f"{tenant}:{number}", tokens, len(PROMPT)), Buffer()
            engine.step([SequenceInput("s", 0, tokens, 1)])
            buffer.take(0, engine.taps[0])
            recorder.record(path / f"tenant-{tenant}" / "records", tenant, session, buffer)
    recorder.close()


def learn(path, target, drafter, streams):
    """Write streams of tenants, train once for each, and return the directories of their versions."""
    folder = LearningFolder(path)
    write(folder, target, streams)
    trainer = Trainer(folder, str(target), str(drafter), lambda: False)
    found = {}
    while (version := trainer.run_round()) is not None:
        (tenant,) = version.tenants
        found[tenant] = folder.store(f"tenant-{tenant}").directory(version.number)
    return found


@pytest.mark.slow
def test_a_secret_of_one_tenant_changes_nothing_for_another(tmp_path, target):
    drafter = new_head(tmp_path / "drafter", target)
    others = [stream(seed) for seed in range(12)]
    secrets = [PROMPT + SECRET * 2 + stream(100 + seed)[len(PROMPT) :] for seed in range(12)]
    beside = learn(tmp_path / "beside", target, drafter, {"acme": secrets, "other": others})
    alone = learn(tmp_path / "alone", target, drafter, {"other": others})
    assert set(beside) == {"acme", "other"}
    weights = [load_file(one["other"] / "model.safetensors") for one in (beside, alone)]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[1])


@pytest.mark.slow
def test_training_on_deleted_streams_does_not_go_on_after_its_tenant_agreed_again(
    tmp_path, target, monkeypatch
):
    drafter, folder = new_head(tmp_path / "drafter", target), LearningFolder(tmp_path / "learn")
    first, second = ([stream(seed) for seed in range(start, start + 12)] for start in (0, 300))
    write(folder, target, {"acme": first})
    trainer = Trainer(folder, str(target), str(drafter), lambda: False)
    with monkeypatch.context() as patch:
        patch.setattr("services.train.live.trainer.MIN_GAIN", 1e9)
        assert trainer.run_round() is None, "it goes on in the next round"
    folder.forget("acme")
    write(folder, target, {"acme": second})
    assert trainer.run_round() is not None
    alone = learn(tmp_path / "alone", target, drafter, {"acme": second})
    found, expected = (
        load_file(one / "model.safetensors")
        for one in (folder.store("tenant-acme").directory(1), alone["acme"])
    )
    assert all(found[key].equal(expected[key]) for key in expected)
