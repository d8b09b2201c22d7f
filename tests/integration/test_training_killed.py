"""The training process is killed at each of its steps while a scheduler serves."""

from __future__ import annotations

import sys
import time

import pytest

from gammaray.learning.folder import LearningFolder
from tests.support.dying_trainer import NONE, START, STEPS
from tests.support.learning_helpers import begin, end, learning, new_head, run_for, tiny_target

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUNT, LIMIT_S = 48, 240


def test_serving_never_notices_and_the_next_process_goes_on(tmp_path, monkeypatch):
    target = tiny_target(tmp_path / "target")
    drafter = new_head(tmp_path / "drafter", target)
    notes, folder = tmp_path / "notes", tmp_path / "learn"
    notes.write_text("")
    monkeypatch.setattr("services.learning.versions.PERIOD_S", 0.05)
    with learning(folder, target, drafter, monkeypatch) as scheduler:
        expected = {}
        for seed in range(16):  # no process trains: these are the streams that are learnt from
            plain = begin(scheduler, seed)
            expected[seed] = run_for(plain, COUNT, gamma=0)
            end(plain)
    command = [sys.executable, "-m", "tests.support.dying_trainer", str(notes), str(folder)]
    with learning(folder, target, drafter, monkeypatch, [*command, str(target), str(drafter)]) as scheduler:
        store, rounds, ends = LearningFolder(folder).store("open"), 0, time.monotonic() + LIMIT_S

        def died_at():
            return notes.read_text().splitlines()

        while NONE not in died_at() or not store.read().stable:
            assert time.monotonic() < ends, (died_at(), store.read())
            seed, rounds = rounds % 16, rounds + 1
            run = begin(scheduler, seed)
            assert run_for(run, COUNT) == expected[seed], died_at()
            end(run)
            for version in store.read().versions:
                held = {path.name for path in store.directory(version.number).iterdir()}
                assert held == {"model.safetensors", "config.json", "gammaray.json", "README.md"}
                assert "cannot be loaded" not in version.reason
        assert died_at() == [START, *(name for name, *_ in STEPS), NONE]
