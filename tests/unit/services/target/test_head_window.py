"""A head that begins after a prompt reads the newest positions, and continues from there."""

from __future__ import annotations

import math
import shutil

import pytest
from engine_helpers import random_tokens
from head_helpers import bigram_head, bigram_target

from gammaray.blocks import Shape, Verdict
from gammaray.config import TargetSettings
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.process.fingerprints import model_identity, vocab_sha256
from services.scheduling.planning import Limits
from services.scheduling.tasks import SessionSpec, VerifyTask
from services.target.loading import TRAINED_WINDOW, load_local_drafter
from services.target.scheduler import TargetScheduler
from services.train.answers.store import write_json

PROMPT = random_tokens(200, seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = bigram_target(folder / "target")
    return target, bigram_head(folder / "head", target)


class Session:
    """A session's blocks, one after another."""

    def __init__(self, target, head, window=0):
        engine = load_engine(str(target))
        settings = TargetSettings(model=str(target), head=str(head), head_window=window)
        self.drafter = load_local_drafter(settings, engine)
        self.scheduler = TargetScheduler(engine, Limits(1024, 256), head=self.drafter, draft_ahead=False)
        self.tokens, self.held, self.fed = list(PROMPT), 0, []

    def cycle(self, shape: Shape) -> int:
        """Commit a block's tokens; return the length of its proposal."""
        spec = SessionSpec(SamplingParams(temperature=0.0), VerificationMethod.COUPLED, len(PROMPT), ())
        block = VerifyTask(
            request_id=0,
            session_id="s",
            epoch=1,
            base_position=len(self.tokens),
            context_start=self.held,
            context=self.tokens[self.held :],
            spec=spec,
            deadline=math.inf,
            deliver=lambda task, reply: None,
            proposal=Proposal(),
            num_top_logprobs=None,
            head=shape,
        )
        self.scheduler.submit([block])
        while not (replies := self.scheduler.step()):
            pass
        verdict = replies[0][1].outcome
        assert isinstance(verdict, Verdict), verdict
        drafted = () if verdict.drafted is None else verdict.drafted.token_ids
        self.held = len(self.tokens)
        self.tokens += [*(drafted[node] for node in verdict.accepted_path), verdict.next_token_id]
        return len(drafted)

    def watch(self, monkeypatch):
        """Note how many tokens each forward of the head reads."""
        step = self.drafter.engine.step

        def watched(feeds):
            self.fed.append(sum(len(feed.token_ids) for feed in feeds))
            return step(feeds)

        monkeypatch.setattr(Engine, "chain", None)
        monkeypatch.setattr(self.drafter.engine, "step", watched)


@pytest.mark.parametrize("window", [0, 32, 100])
def test_head_reads_the_newest_positions_of_a_prompt(pair, window, monkeypatch):
    session = Session(*pair, window)
    session.cycle(Shape(0))
    session.watch(monkeypatch)
    assert session.cycle(Shape(1)) == 1
    assert sum(session.fed) == (window or len(PROMPT))
    session.fed.clear()
    committed = len(session.tokens)
    assert session.cycle(Shape(1)) == 1
    assert sum(session.fed) == 2, "the tokens since"
    assert session.drafter.engine.length("s") == committed


def test_exact_head_is_accepted_whatever_it_has_read(pair):
    lengths = []
    for window in (0, 32):
        session = Session(*pair, window)
        session.cycle(Shape(0))
        for _ in range(8):
            session.cycle(Shape(3))
        lengths.append(len(session.tokens))
    assert lengths == [len(PROMPT) + 1 + 8 * 4] * 2


def test_heads_of_gammaray_train_read_few_positions_unless_told_otherwise(pair, tmp_path, monkeypatch):
    target, head = pair
    trained = tmp_path / "trained"
    shutil.copytree(head, trained)
    fingerprint = model_identity(str(target), dtype="-", device="cpu", deterministic=False).partition("/")[0]
    described = {
        "format": 1,
        "target": {"name": "target", "fingerprint": fingerprint},
        "tokenizer": {"fingerprint": vocab_sha256(str(target))},
    }
    write_json(trained / "gammaray.json", described)
    for window, read in [(0, TRAINED_WINDOW), (100, 100)]:
        session = Session(target, trained, window)
        session.cycle(Shape(0))
        session.watch(monkeypatch)
        assert session.cycle(Shape(1)) == 1
        assert sum(session.fed) == read
