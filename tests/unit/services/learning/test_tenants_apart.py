"""What a tenant's drafter learns of a secret in the tenant's streams, and what those of others do."""

import pytest
from safetensors.torch import load_file

from gammaray.learning.folder import LearningFolder
from gammaray.types import SamplingParams, VerificationMethod
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine
from services.learning.records import Buffer, Recorder
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.train.live.trainer import Trainer
from tests.support.engine_helpers import random_tokens
from tests.support.learning_helpers import TAPS, new_head

SECRET = random_tokens(24, seed=77, vocab_size=97)
PROMPT = random_tokens(12, seed=78, vocab_size=97)


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 300)
    monkeypatch.setattr("services.train.live.trainer.RATE", 3e-3)
    monkeypatch.setattr("services.train.live.trainer.MIN_GAIN", 0.0)


def stream(seed):
    return PROMPT + random_tokens(60, seed=seed, vocab_size=97)


def learn(path, target, drafter, streams):
    """Write streams of tenants, train once for each, and return the directories of their versions."""
    folder, engine, recorder = LearningFolder(path), load_engine(str(target)), Recorder()
    engine.tap(TAPS)
    for tenant, texts in streams.items():
        folder.consent(tenant, "own")
        for number, tokens in enumerate(texts):
            spec = SessionSpec(SamplingParams(seed=1), VerificationMethod.COUPLED, len(PROMPT), ())
            session, buffer = SessionCopy(f"{tenant}:{number}", 1, spec), Buffer()
            session.tokens = tokens
            engine.step([SequenceInput("s", 0, tokens, 1)])
            buffer.take(0, engine.taps[0])
            recorder.record(path / f"tenant-{tenant}" / "records", tenant, session, buffer)
    recorder.close()
    trainer = Trainer(folder, str(target), str(drafter), lambda: False)
    found = {}
    while (version := trainer.run_round()) is not None:
        (tenant,) = version.tenants
        found[tenant] = folder.store(f"tenant-{tenant}").directory(version.number)
    return found


def test_a_secret_of_one_tenant_changes_nothing_for_another(tmp_path, target):
    drafter = new_head(tmp_path / "drafter", target)
    others = [stream(seed) for seed in range(12)]
    secrets = [PROMPT + SECRET * 2 + stream(100 + seed)[len(PROMPT) :] for seed in range(12)]
    beside = learn(tmp_path / "beside", target, drafter, {"acme": secrets, "other": others})
    alone = learn(tmp_path / "alone", target, drafter, {"other": others})
    assert set(beside) == {"acme", "other"}
    weights = [load_file(one["other"] / "model.safetensors") for one in (beside, alone)]
    assert all(weights[0][key].equal(weights[1][key]) for key in weights[1])
