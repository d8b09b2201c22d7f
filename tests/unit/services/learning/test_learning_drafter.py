"""Versions of a head that take over while sessions draft: text, canary, records, tenants."""

import shutil
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from gammaray.blocks import Shape
from gammaray.errors import InvalidArgumentError
from gammaray.learning.folder import LearningFolder
from services.engine.core.model import load_model
from services.train.draft_model import TrainableDraft
from services.train.evaluate import evaluate
from services.train.live.__main__ import train_until
from services.train.live.trainer import Trainer
from services.train.trainable import train_on
from tests.support.learning_helpers import (
    begin,
    draft_model,
    end,
    learning,
    new_head,
    publish,
    records,
    right_head,
    run_for,
    serve_until,
    useless,
)
from tests.support.small_files import largest_file
from tests.support.workers.redis_helpers import wait_until

COUNT = 110


@pytest.fixture(scope="module")
def drafters(tmp_path_factory, target):
    """A drafter that predicts the target exactly, and one that is always wrong."""
    folder = tmp_path_factory.mktemp("drafters")
    right = right_head(folder / "right", target)
    return right, useless(folder / "useless", right, target)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory, target):
    return new_head(tmp_path_factory.mktemp("untrained") / "drafter", target)


def test_versions_that_take_over_change_no_token(tmp_path, target, drafters, monkeypatch):
    """A session drafts with version 0, a candidate, a promoted version, and after a rollback."""
    right, wrong = drafters
    monkeypatch.setattr("services.learning.versions.CANARY_SHARE", 1.0)
    with learning(tmp_path, target, right, monkeypatch) as scheduler:
        store = LearningFolder(tmp_path).store("open")
        plain = begin(scheduler, 1)
        expected = run_for(plain, COUNT, gamma=0)
        end(plain)
        run = begin(scheduler, 1)

        def go_on(count):
            """Return whether the first token of any proposal was accepted."""
            began, accepted = len(run.proposals), []
            while len(run.output) < count:
                at = len(run.tokens)
                run.cycle(Shape(3))
                accepted.append(run.proposals[-1][:1] == (run.tokens[at],))
            assert all(run.proposals[began + 1 :]), "each cycle but the first has a proposal"
            return any(accepted)

        def take_over():
            time.sleep(1.0)
            run.cycle(Shape(3))  # the version that drafted before may have done so ahead

        assert go_on(20)
        publish(store, wrong)
        take_over()
        assert not go_on(45)
        store.promote(1)
        take_over()
        assert not go_on(70)
        store.roll_back(1, "by hand")
        take_over()
        assert go_on(COUNT)
        assert run.output[:COUNT] == expected


def test_poisoned_and_damaged_versions_are_rolled_back_without_a_hand(
    tmp_path, target, drafters, monkeypatch
):
    right, wrong = drafters
    with learning(tmp_path, target, right, monkeypatch) as scheduler:
        store = LearningFolder(tmp_path).store("open")
        publish(store, wrong)
        serve_until(scheduler, lambda: store.read().candidate is None)
        assert store.read().stable == 0
        assert "first tokens accepted" in store.read().versions[0].reason
        publish(store)  # an empty directory
        wait_until(lambda: store.read().candidate is None)
        broken = tmp_path / "broken"
        shutil.copytree(right, broken)
        (broken / "model.safetensors").write_bytes(b"\0" * 100)
        publish(store, broken)
        wait_until(lambda: store.read().candidate is None)
        assert [one.status for one in store.read().versions] == ["rolled back"] * 3
        run = begin(scheduler, 1)
        run_for(run, 30)
        assert len(run.proposals) < 15, "the drafter of the start proposes, and is accepted"


def test_streams_of_tenants_that_agreed_are_kept_until_they_are_deleted(
    tmp_path, target, drafters, monkeypatch
):
    folder = LearningFolder(tmp_path)
    folder.consent("acme", "own")
    with learning(tmp_path / "new" / "learn", target, drafters[0], monkeypatch):
        assert (tmp_path / "new" / "learn").stat().st_mode & 0o777 == 0o700
    with learning(tmp_path, target, drafters[0], monkeypatch) as scheduler:
        for seed, tenant in ((1, ""), (2, "acme"), (3, "other"), (4, "acme"), (5, "acme")):
            run = begin(scheduler, seed, tenant)
            run_for(run, 30)
            end(run, forgets=seed == 4)
        wait_until(lambda: len(records(tmp_path, "tenant-acme")) == 2)
        wait_until(lambda: len(records(tmp_path)) == 1)
        run = begin(scheduler, 6, "acme")
        spec = replace(run.spec(), no_learning=True)
        monkeypatch.setattr(run, "spec", lambda: spec)
        run_for(run, 30)
        end(run)
        run = begin(scheduler, 5, "acme")
        run_for(run, 30)
        end(run, forgets=True)
        wait_until(lambda: len(records(tmp_path, "tenant-acme")) == 1)
    assert not list(tmp_path.glob("tenant-other"))


def serve_24(scheduler, folder, tenant=""):
    for seed in range(24):
        run = begin(scheduler, seed, tenant)
        run_for(run, 64)
        end(run)
    wait_until(lambda: len(records(folder, f"tenant-{tenant}" if tenant else "open")) == 24)


@pytest.mark.slow
def test_training_publishes_what_is_better_on_newer_streams(tmp_path, target, untrained, monkeypatch):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 1000)
    monkeypatch.setattr("services.train.live.trainer.RATE", 3e-3)
    with learning(tmp_path, target, untrained, monkeypatch) as scheduler:
        serve_24(scheduler, tmp_path)
        folder = LearningFolder(tmp_path)
        empty, half = records(tmp_path)[:2]  # as on a machine that loses power
        empty.write_bytes(b"")
        half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
        trainer = Trainer(folder, str(target), str(untrained), lambda: False)
        version = trainer.run_round()
        assert version is not None
        assert (version.number, version.parent, version.tenants) == (1, 0, {"": 0})
        assert version.expected > 1.05 * version.parent_expected
        assert trainer.run_round() is None, "a candidate waits"
        store = folder.store("open")
        serve_until(scheduler, lambda: store.read().candidate is None)
        assert store.read().stable == 1
        stopped = Trainer(folder, str(target), str(untrained), lambda: True)
        assert stopped.run_round() is None


def test_training_from_a_cut_draft_model_is_refused(tmp_path, target):
    model = load_model(str(target), device="cpu", dtype="float32").module
    cut = draft_model(tmp_path / "cut", target) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    drafter = TrainableDraft(model, (0, 1), torch.arange(97))
    with pytest.raises(InvalidArgumentError, match="allowed: a drafter of the same shape"):
        drafter.start_from(str(cut.parent), str(target))


@pytest.mark.slow
def test_full_disk_delays_a_version(tmp_path, target, untrained, monkeypatch):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 1000)
    monkeypatch.setattr("services.train.live.trainer.RATE", 3e-3)
    with learning(tmp_path, target, untrained, monkeypatch) as scheduler:
        serve_24(scheduler, tmp_path)
    store, failures = LearningFolder(tmp_path).store("open"), []
    with ExitStack() as full_disk:
        full_disk.enter_context(largest_file(1000))

        def wait(_seconds):
            failures.append(store.read().versions)
            full_disk.close()

        train_until(lambda: bool(store.read().versions), wait, tmp_path, str(target), str(untrained))
    assert failures == [()]
    assert store.read().candidate == 1


@pytest.mark.slow
def test_streams_deleted_during_a_round_are_not_trained_on_from_then_on(tmp_path, target, monkeypatch):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 1000)
    head = new_head(tmp_path / "new", target)
    with learning(tmp_path, target, head, monkeypatch) as scheduler:
        serve_24(scheduler, tmp_path)
    trainer = Trainer(LearningFolder(tmp_path), str(target), str(head), lambda: False)
    taught = []

    def step(drafter, optimizer, streams, *given):
        taught.append({one.path for one in streams})
        train_on(drafter, optimizer, streams, *given)
        if len(taught) == 1:
            for path in sorted(taught[0])[:6]:
                path.unlink()

    monkeypatch.setattr("services.train.live.trainer.train_on", step)
    assert trainer.run_round() is not None
    first, *later = taught
    assert later
    assert all(paths == set(sorted(first)[6:]) for paths in later)


@pytest.mark.slow
def test_nothing_is_published_for_a_tenant_that_withdrew_during_the_round(
    tmp_path, target, untrained, monkeypatch
):
    monkeypatch.setattr("services.train.live.trainer.MIN_TOKENS", 300)
    monkeypatch.setattr("services.train.live.trainer.RATE", 3e-3)
    folder = LearningFolder(tmp_path)
    folder.consent("acme", "own")
    with learning(tmp_path, target, untrained, monkeypatch) as scheduler:
        serve_24(scheduler, tmp_path, "acme")
    trainer = Trainer(folder, str(target), str(untrained), lambda: False)
    scored = []

    def scoring(*given):
        scored.append(evaluate(*given))
        if len(scored) == 2:  # after the steps
            folder.forget("acme")
        return scored[-1]

    monkeypatch.setattr("services.train.live.trainer.evaluate", scoring)
    monkeypatch.setattr("services.train.live.trainer.MIN_GAIN", 0.0)
    assert trainer.run_round() is None
    assert len(scored) == 2
    assert folder.store("tenant-acme").read().versions == ()


def test_one_process_trains_for_all_workers_of_a_machine(tmp_path, target, monkeypatch):
    """Both follow the same folder; the second one ends at once."""
    head = new_head(tmp_path / "new", target)
    rounds = []
    monkeypatch.setattr(Trainer, "run_round", lambda self: rounds.append(self))

    def second_ends(_seconds):
        train_until(lambda: False, pytest.fail, tmp_path, str(target), str(head))

    train_until(lambda: len(rounds) > 1, second_ends, tmp_path, str(target), str(head))
    assert len(rounds) == 2
    assert rounds[0] is rounds[1]
