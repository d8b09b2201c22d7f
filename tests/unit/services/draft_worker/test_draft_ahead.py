"""Draft-ahead is memoisation: the same proposals, sooner. Runs, several tokens of a chain in one call of the
engine, give the tokens of single forwards.
"""

from __future__ import annotations

import random

import pytest
import torch

from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.sampling.noise import Noise
from services.scheduling.tasks import Release
from services.speculation.predictions import predictions
from services.speculation.proposals import RUN
from tests.support.draft_helpers import VOCAB, ChainingEngine, Drafter, ParallelEngine, TableEngine, outcome

COUPLED, REJECTION, NAIVE = (
    VerificationMethod.COUPLED,
    VerificationMethod.REJECTION,
    VerificationMethod.NAIVE,
)

PROMPT = [1, 2, 3, 4]

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=5),
    "plain": SamplingParams(seed=5),
    "cool": SamplingParams(temperature=0.6, top_p=0.95, seed=5),
    "penalties": SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, seed=5),
    "min-tokens": SamplingParams(temperature=0.0, presence_penalty=0.7, min_tokens=9, seed=5),
}


def savings(ahead: Drafter, fresh: Drafter, shapes, seed, params, method=COUPLED, eos=()) -> list[int]:
    """Check that proposals of these shapes are equal with draft-ahead; return the forwards that it saved.

    Over many cycles with budgets of ahead forwards from none to all.
    """
    rng, tokens, saved = random.Random(seed), list(PROMPT), []
    for _ in range(40):
        gamma, max_nodes = rng.choice(shapes)
        fields = {"max_nodes": max_nodes, "params": params, "method": method, "eos": eos}
        ours, theirs = (drafter.ask(tokens, gamma, **fields) for drafter in (ahead, fresh))
        assert ours.outcome == theirs.outcome
        assert len(ours.outcome) <= max(gamma, max_nodes)
        assert ours.outcome.depth <= gamma
        saved.append(theirs.timing.num_forwards - ours.timing.num_forwards)
        ahead.idle(rng.choice((0, 1, 3, 10**6)))
        tokens += outcome(ahead.engine, tokens, ours.outcome, rng, params, method)
    return saved


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("method", list(VerificationMethod))
@pytest.mark.parametrize("engine", [TableEngine, ChainingEngine, ParallelEngine])
def test_ahead_chains_are_those_that_are_drafted_on_demand(engine, method, params):
    ahead = Drafter(engine(spread=5.0), ahead_rows=3)
    fresh = Drafter(ParallelEngine(spread=5.0) if engine is ParallelEngine else TableEngine(spread=5.0))
    saved = savings(ahead, fresh, [(1, 0), (3, 0), *[(4, 0)] * 3], 3, params, method, (7, 8))
    assert sum(saved) > 0
    # A run may continue after the token at which the chain ends, or one that a filter drops.
    assert min(saved) >= -engine.can_chain * 2 * (RUN - 1)
    assert ahead.scheduler.lookahead.stats.lookups == 39


TREES = {
    **{f"{gamma}x{nodes}": [(gamma, nodes)] for gamma, nodes in ((4, 8), (3, 12), (6, 16), (2, 40))},
    "changing": [(1, 0), (4, 0), (4, 12), (6, 8), (2, 3)],
}


@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", ["greedy", "plain", "penalties"])
@pytest.mark.parametrize("engine", [TableEngine, ParallelEngine])
def test_ahead_trees_are_those_that_are_drafted_on_demand(engine, name, shapes):
    params = PARAMS[name]
    ahead, fresh = Drafter(engine(spread=5.0), ahead_rows=6), Drafter(engine(spread=5.0))
    saved = savings(ahead, fresh, shapes, 4, params)
    # `outcome` ignores penalties, and a parallel draft saves whole blocks only.
    assert sum(saved) > 0 or (engine is ParallelEngine and params.frequency_penalty)


def test_tree_level_wider_than_a_forward_comes_in_several():
    narrow, wide = Drafter(TableEngine(), max_batch_tokens=2), Drafter(TableEngine())
    ours, theirs = narrow.ask(PROMPT, 4, max_nodes=40), wide.ask(PROMPT, 4, max_nodes=40)
    assert ours.outcome == theirs.outcome
    assert len(theirs.outcome) > 10
    assert ours.timing.num_forwards > theirs.timing.num_forwards == 4


def test_ahead_own_continuation_is_ready_without_a_forward():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    first = ahead.ask(PROMPT, 4).outcome
    # One more than was proposed is the draft's own guess of the bonus.
    longer = Drafter(TableEngine()).ask(PROMPT, 5).outcome
    assert longer.token_ids[:4] == first.token_ids
    ahead.idle()
    steps = ahead.engine.num_steps
    reply = ahead.ask([*PROMPT, *longer.token_ids], 4)
    assert reply.timing.num_forwards == 0
    assert ahead.engine.num_steps == steps
    stats = ahead.scheduler.lookahead.stats
    assert (stats.lookups, stats.hits) == (1, 1)


def test_ahead_likely_runner_ups_at_every_position_are_ready():
    noise, positions = Noise(5, 0, VOCAB), set()
    for seed in range(12):
        engine = TableEngine(seed)
        proposal = Drafter(engine).ask(PROMPT, 3).outcome.token_ids
        reached = 1.0
        for accepted in range(3):
            tokens = [*PROMPT, *proposal[:accepted]]
            logits = engine.table[tokens[-2], tokens[-1]]
            (prediction,) = predictions(
                COUPLED, logits[None], noise, [len(tokens)], temperature=1.0, top_k=8, bits=10
            )
            (best, weight), (second, chance) = prediction.guesses(None)[:2]
            assert best == proposal[accepted]
            if reached * chance > 0.15:
                ahead = Drafter(TableEngine(seed), ahead_rows=8)
                ahead.ask(PROMPT, 3)
                ahead.idle()
                assert ahead.ask([*tokens, second], 3).timing.num_forwards == 0
                positions.add(accepted)
            reached *= weight
    assert positions == {0, 1, 2}


def test_ahead_ends_by_itself_and_a_new_request_preempts_it():
    ahead = Drafter(TableEngine(), ahead_rows=1)
    ahead.ask(PROMPT, 6)
    num_ahead = ahead.idle()
    assert 6 < num_ahead < 100
    assert not ahead.scheduler.has_work
    ahead.ask([*PROMPT, 9], 6)
    ahead.idle(2)
    assert ahead.scheduler.has_work
    before = ahead.engine.num_steps
    # Another session's block runs in the very next forwards, undisturbed.
    reply = ahead.ask(PROMPT, 3, session_id="t")
    assert ahead.engine.num_steps - before == 3 == reply.timing.num_forwards
    assert ahead.idle() > 10


def test_ahead_release_ends_it_and_frees_everything():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    for name in ("s", "t"):
        ahead.ask(PROMPT, 4, session_id=name)
    ahead.idle(2)
    ahead.scheduler.release([Release("s")])
    assert list(ahead.engine.caches) == ["t"]
    assert ahead.idle() > 0
    ahead.scheduler.release([Release("t")])
    assert not ahead.scheduler.has_work
    assert not ahead.engine.caches
    assert not ahead.scheduler.speculations


def test_ahead_restarts_after_an_eviction():
    ahead, fresh = Drafter(TableEngine(), ahead_rows=4), Drafter(TableEngine())
    proposal = ahead.ask(PROMPT, 4).outcome
    ahead.idle(2)
    ahead.engine.release("s")
    assert ahead.idle() == 1  # it looks, and finds nothing to build on
    tokens = [*PROMPT, *proposal.token_ids[:2], 11]
    assert ahead.ask(tokens, 4).outcome == fresh.ask(tokens, 4).outcome


def test_drafting_continues_after_its_cache_is_evicted():
    drafter = Drafter(TableEngine())
    wanted = Drafter(TableEngine()).ask(PROMPT, 6).outcome
    drafter.scheduler.submit([drafter.task(PROMPT, 6)])
    for _ in range(3):
        assert drafter.scheduler.step() == []
    drafter.engine.release("s")
    replies = []
    for _ in range(20):
        replies += drafter.scheduler.step()
    assert [reply.outcome for _, reply in replies] == [wanted]


def test_ahead_evicts_no_other_session():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    ahead.engine.has_space = False
    ahead.ask(PROMPT, 4)
    steps = ahead.engine.num_steps
    ahead.idle()
    assert ahead.engine.num_steps == steps


def test_ahead_failing_forward_costs_only_what_was_prepared():
    ahead = Drafter(TableEngine(), ahead_rows=4)
    ahead.ask(PROMPT, 4)
    step, ahead.engine.step = ahead.engine.step, lambda feeds: 1 / 0
    assert ahead.idle() == 1
    ahead.engine.step = step
    assert ahead.ask([*PROMPT, 9], 4).outcome == Drafter(TableEngine()).ask([*PROMPT, 9], 4).outcome


def test_ahead_nothing_follows_the_end_of_sequence_or_of_the_context(monkeypatch):
    monkeypatch.setattr("services.speculation.outcomes.MIN_OUTCOME", 0.01)  # so that something is left to do
    engine = TableEngine()
    fresh = Drafter(engine).ask(PROMPT, 1).outcome
    ahead = Drafter(TableEngine(), ahead_rows=4)
    assert ahead.ask(PROMPT, 4, eos=fresh.token_ids).outcome == fresh
    stats = ahead.scheduler.lookahead.stats
    ahead.idle()
    chosen = {
        node.token_id for node in ahead.scheduler.speculations["s"].tree.root.below() if node.prediction
    }
    assert fresh.token_ids[0] not in chosen
    engine = TableEngine()
    end = Drafter(engine, ahead_rows=4)
    tokens = [1 + i % 9 for i in range(engine.max_context - 2)]
    assert len(end.ask(tokens, 4).outcome) == 2
    end.idle()
    assert end.ask([*tokens, 3, 4], 4).outcome == Proposal()
    assert stats.rows > 0


def test_rejection_predictions_follow_the_distribution():
    noise, distribution_row = (
        Noise(5, 0, VOCAB),
        torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)),
    )
    (prediction,) = predictions(
        REJECTION, distribution_row.log_softmax(-1)[None], noise, [9], temperature=1.0, top_k=8, bits=10
    )
    bonus = dict(prediction.guesses(None))
    assert sum(bonus.values()) <= 1
    assert list(bonus.values()) == sorted(bonus.values(), reverse=True)
    for base in range(4, 9):
        tested = dict(prediction.guesses(base))
        chosen = prediction.choose(base)
        assert tested[chosen] == prediction.confidence(base)
        assert sum(tested.values()) <= 1 + 1e-9
        assert all(tested[token] < bonus[token] for token in tested if token != chosen)


def lengths_of_runs(drafter, monkeypatch):
    """Return a list that gets the length of each run from now on."""
    chain, lengths = drafter.engine.chain, []

    def noted(*args, **options):
        token_ids, logits = chain(*args, **options)
        lengths.append(len(logits))
        return token_ids, logits

    monkeypatch.setattr(drafter.engine, "chain", noted)
    return lengths


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
def test_a_session_alone_is_drafted_in_runs(temperature, monkeypatch):
    params = SamplingParams(temperature=temperature, seed=5)
    ours, theirs = Drafter(ChainingEngine()), Drafter(TableEngine())
    counts = lengths_of_runs(ours, monkeypatch)
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


@pytest.mark.parametrize(("name", "method"), [("penalties", COUPLED), ("plain", REJECTION), ("plain", NAIVE)])
def test_penalties_and_sampling_are_drafted_step_by_step(name, method, monkeypatch):
    """Penalties depend on the tokens before; other methods draw what they propose."""
    ours = Drafter(ChainingEngine(), ahead_rows=3)
    counts = lengths_of_runs(ours, monkeypatch)
    ours.ask(PROMPT, 4, params=PARAMS[name], method=method)
    ours.idle()
    assert counts == []


def test_a_run_ahead_ends_when_a_block_arrives(monkeypatch):
    ahead = Drafter(ChainingEngine(spread=12.0), ahead_rows=3)
    counts = lengths_of_runs(ahead, monkeypatch)
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
    ours = Drafter(ChainingEngine())
    counts = lengths_of_runs(ours, monkeypatch)
    feed = ours.engine.feed_one

    def hurried(fed):
        ours.scheduler.preempt([ours.task(PROMPT, 1, session_id="t")])
        return feed(fed)

    monkeypatch.setattr(ours.engine, "feed_one", hurried)
    reply = ours.ask(PROMPT, 4)
    assert set(counts) == {1}
    assert reply.outcome == Drafter(TableEngine()).ask(PROMPT, 4).outcome


def test_concurrent_sessions_are_drafted_step_by_step(monkeypatch):
    ours = Drafter(ChainingEngine())
    counts = lengths_of_runs(ours, monkeypatch)
    ours.scheduler.submit([ours.task(PROMPT, 4, session_id=name) for name in "ab"])
    while ours.scheduler.has_work:
        ours.scheduler.step()
    assert counts == []


def test_session_is_drafted_step_by_step_if_filters_cut_its_runs(monkeypatch):
    ours = Drafter(ChainingEngine())
    counts = lengths_of_runs(ours, monkeypatch)
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
