"""Runs: several tokens of a chain in one call of the engine give the tokens of single forwards."""

from __future__ import annotations

import pytest

from gammaray.types import SamplingParams, VerificationMethod
from services.scheduling.tasks import Release
from services.speculation.proposals import RUN
from tests.support.draft_helpers import VOCAB, ChainingEngine, Drafter, TableEngine

COUPLED, REJECTION, NAIVE = (
    VerificationMethod.COUPLED,
    VerificationMethod.REJECTION,
    VerificationMethod.NAIVE,
)
PROMPT = [1, 2, 3, 4]
GREEDY, PLAIN, COOL = (SamplingParams(temperature=temperature, seed=5) for temperature in (0.0, 1.0, 0.6))
PENALTIES = SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, seed=5)


@pytest.mark.parametrize("params", [GREEDY, PLAIN, COOL], ids=["greedy", "plain", "cool"])
def test_a_session_alone_is_drafted_in_runs(params, monkeypatch):
    ours, theirs = Drafter(ChainingEngine()), Drafter(TableEngine())
    counts = []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    first = ours.ask(PROMPT, RUN + 3, params=params)
    assert first.outcome == theirs.ask(PROMPT, RUN + 3, params=params).outcome
    assert counts == [RUN, 3], "the first one begins with the prompt"
    assert first.timing.num_forwards == RUN + 3
    assert first.timing.batch_tokens == len(PROMPT) + RUN + 2


def test_a_run_cut_by_a_filter_gives_the_tokens_of_single_steps():
    """The largest score is often one that top-k drops: the choices are those of single steps all the same."""
    params, wasted = SamplingParams(temperature=1.5, top_k=2, seed=5), 0
    for seed in range(8):
        ours, theirs = Drafter(ChainingEngine(seed)), Drafter(TableEngine(seed))
        reply = ours.ask(PROMPT, 6, params=params)
        assert reply.outcome == theirs.ask(PROMPT, 6, params=params).outcome
        assert list(ours.engine.tokens("s")) == [*PROMPT, *reply.outcome.token_ids[:5]]
        wasted += reply.timing.num_forwards - 6
    assert wasted > 0


@pytest.mark.parametrize(
    ("params", "method"),
    [(PENALTIES, COUPLED), (PLAIN, REJECTION), (PLAIN, NAIVE)],
    ids=["penalties", "rejection", "naive"],
)
def test_penalties_and_sampling_are_drafted_step_by_step(params, method, monkeypatch):
    """Penalties depend on the tokens before; other methods draw what they propose."""
    ours, counts = Drafter(ChainingEngine(), ahead_rows=3), []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    ours.ask(PROMPT, 4, params=params, method=method)
    ours.idle()
    assert counts == []


def test_a_run_ahead_ends_when_a_block_arrives(monkeypatch):
    ahead, counts = Drafter(ChainingEngine(spread=12.0), ahead_rows=3), []
    monkeypatch.setattr(ahead.engine, "chain", _counting(ahead.engine.chain, counts))
    ahead.ask(PROMPT, 4)
    feed = ahead.engine.feed_one

    def hurried(fed):
        ahead.scheduler.preempt([ahead.task(PROMPT, 1, session_id="t")])
        return feed(fed)

    monkeypatch.setattr(ahead.engine, "feed_one", hurried)
    counts.clear()
    ahead.idle(1)
    assert counts == [1]
    monkeypatch.setattr(ahead.engine, "feed_one", feed)
    ahead.idle(1)
    assert counts == [1, 1], "it is not there yet"
    ahead.ask(PROMPT, 1, session_id="t")
    ahead.scheduler.release([Release("t", 0)])
    ahead.ask([*PROMPT, 9], 4)
    counts.clear()
    ahead.idle(1)
    assert counts == [RUN]


def test_a_run_on_demand_ends_when_another_block_arrives(monkeypatch):
    ours, counts = Drafter(ChainingEngine()), []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    feed = ours.engine.feed_one

    def hurried(fed):
        ours.scheduler.preempt([ours.task(PROMPT, 1, session_id="t")])
        return feed(fed)

    monkeypatch.setattr(ours.engine, "feed_one", hurried)
    reply = ours.ask(PROMPT, 4)
    assert set(counts) == {1}
    assert reply.outcome == Drafter(TableEngine()).ask(PROMPT, 4).outcome


def test_concurrent_sessions_are_drafted_step_by_step(monkeypatch):
    ours, counts = Drafter(ChainingEngine()), []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    ours.scheduler.submit([ours.task(PROMPT, 4, session_id=name) for name in "ab"])
    while ours.scheduler.has_work:
        ours.scheduler.step()
    assert counts == []


def test_session_is_drafted_step_by_step_if_filters_cut_its_runs(monkeypatch):
    ours, counts = Drafter(ChainingEngine()), []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    params, tokens = SamplingParams(temperature=1.5, top_k=1, seed=5), list(PROMPT)
    for _ in range(12):
        tokens += ours.ask(tokens, 6, params=params).outcome.token_ids
    assert 1 < len(counts) < 8


def test_runs_leave_room_in_the_context():
    engine = ChainingEngine()
    tokens = [index % VOCAB for index in range(engine.max_context - 4)]
    ahead = Drafter(engine, ahead_rows=3)
    assert len(ahead.ask(tokens, 6).outcome) == 4
    ahead.idle()
    assert engine.length("s") <= engine.max_context


def _counting(chain, counts):
    def counted(*args, **options):
        token_ids, logits = chain(*args, **options)
        counts.append(len(logits))
        return token_ids, logits

    return counted
