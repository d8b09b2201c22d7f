"""Versions of a draft model in one draft worker: each proposes what it proposes alone."""

import time

import pytest

from gammaray.config import DraftSettings
from gammaray.errors import InvalidArgumentError
from gammaray.learning.folder import LearningFolder
from gammaray.types import Proposal, SamplingParams
from services.draft_worker.loading import check_learning
from services.engine.core.batch import SequenceInput
from services.engine.loader import DraftVersions, load_engine
from tests.support.engine_helpers import random_tokens
from tests.support.learning_helpers import draft_model, draft_scheduler, publish
from tests.support.vllm_helpers import Session, draft, end
from tests.support.workers.redis_helpers import wait_until

NUM_SESSIONS, GAMMA = 5, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory, target):
    """Three versions, all of whose layers matter, so that a cache of another one would be seen."""
    folder = tmp_path_factory.mktemp("models")
    return [draft_model(folder / str(number), target, 0.3, number) for number in range(3)]


@pytest.fixture(autouse=True)
def _untrained(monkeypatch):
    monkeypatch.setattr("services.learning.versions.trainer_command", lambda *_: None)


def sessions(texts, tenant=""):
    """One session for each text, some with a shared cache."""
    return [
        Session(text[:12], SamplingParams(temperature=1.0, seed=1 + at), name=f"{tenant}{at}", salt="x")
        for at, text in enumerate(texts)
    ]


def proposals(scheduler, texts, length, tenant=""):
    """Return what follows each text up to a length; the sessions go on where they were."""
    asked = sessions(texts, tenant)
    for session, text in zip(asked, texts, strict=True):
        session.tokens = text[:length]
    found = draft(scheduler, asked, GAMMA)
    assert all(isinstance(one, Proposal) and one for one in found), found
    while scheduler.has_work:
        scheduler.step()  # draft ahead
    return found


def texts():
    shared = random_tokens(40, seed=9, vocab_size=97)
    return [shared + random_tokens(400, seed=seed, vocab_size=97) for seed in range(NUM_SESSIONS)]


def test_each_version_proposes_what_it_proposes_alone(tmp_path, target, models, monkeypatch):
    """Versions take over in the middle of sessions, two draft in one batch, and caches are not mixed."""
    monkeypatch.setattr("services.learning.versions.CANARY_SHARE", 0.5)
    monkeypatch.setattr("services.draft_worker.loading.SPAN", 16)
    # The test waits for what is drafted ahead: at idle priority it may take minutes beside other programs.
    monkeypatch.setattr("services.draft_worker.lookahead.can_use_idle_priority", lambda: False)
    alone = [draft_scheduler(model, target) for model in models]
    scheduler = draft_scheduler(models[0], target, tmp_path, ahead_rows=8)
    store, written, mixed, switched = LearningFolder(tmp_path).store("open"), texts(), 0, 0
    last = {}
    try:
        for length in range(50, 400, 3):
            if length == 110:
                publish(store, models[1])
            elif length == 200:
                store.promote(1)
                publish(store, models[2], parent=1)
            elif length == 299:
                store.roll_back(2, "by hand")
            if length in (110, 200, 299):
                time.sleep(0.5)
            found = proposals(scheduler, written, length)
            expected = [proposals(one, written, length) for one in alone]
            for at, one in enumerate(found):
                assert one == expected[one.version][at], (length, at, one.version)
                switched += last.get(at, 0) != one.version
                last[at] = one.version
            mixed += len({one.version for one in found}) > 1
        assert {one.version for one in found} == {1}
        assert mixed > 20
        assert switched > 20
    finally:
        for one in (scheduler, *alone):
            one.close()


def test_one_endless_session_decides_on_a_candidate(tmp_path, target, models, monkeypatch):
    """Its proposals are drafted by both versions in turn; the candidate is the right one, the other wrong."""
    monkeypatch.setattr("services.draft_worker.loading.SPAN", 32)
    right = draft_model(tmp_path / "right", target)
    scheduler = draft_scheduler(models[0], target, tmp_path / "learn")
    store = LearningFolder(tmp_path / "learn").store("open")
    publish(store, right)
    time.sleep(0.5)
    alone, text = draft_scheduler(right, target), random_tokens(12, seed=1, vocab_size=97)
    try:
        ends = time.monotonic() + 60
        while store.read().candidate is not None and time.monotonic() < ends and len(text) < 500:
            proposals(scheduler, [text], len(text))
            (one,) = proposals(alone, [text], len(text))
            text.append(one.token_ids[0])  # the target's own token, as the right one never errs
        wait_until(lambda: store.read().candidate is None)
        assert store.read().stable == 1
    finally:
        scheduler.close()
        alone.close()


def test_streams_of_adapters_are_not_kept(tmp_path, target, models):
    scheduler = draft_scheduler(models[0], target, tmp_path)
    ended = sessions(texts())
    ended[1].adapter = "other"
    for session, text in zip(ended, texts(), strict=True):
        session.tokens = text[:60]
    draft(scheduler, ended, GAMMA)
    end(scheduler, *ended)
    scheduler.close()
    assert len(list((tmp_path / "open" / "records").glob("*.npz"))) == NUM_SESSIONS - 1


@pytest.mark.parametrize("options", [{}, {"draft_weights": "int8"}, {"engine": "transformers"}])
def test_a_version_computes_what_it_computes_if_loaded_alone(target, models, options):
    settings = DraftSettings(model=str(models[0]), target=str(target), **options)
    alone = load_engine(
        str(models[1]), draft_for=str(target), weights=settings.draft_weights, engine=settings.engine
    )
    other = load_engine(
        str(models[0]), draft_for=str(target), weights=settings.draft_weights, engine=settings.engine
    )
    runner = DraftVersions(str(models[0]), settings, str(target)).runner(str(models[1]))
    other.serve_versions(lambda session_id: runner)
    feed = [SequenceInput("a", 0, random_tokens(20, seed=3, vocab_size=97), 20)]
    assert other.step(feed)[0].equal(alone.step(feed)[0])


def test_draft_models_of_others_do_not_learn(tmp_path, target):
    settings = DraftSettings(model=str(target), target=str(target), learn=str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=r"learn: .* no draft model of gammaray train"):
        check_learning(str(target), str(target), settings)
