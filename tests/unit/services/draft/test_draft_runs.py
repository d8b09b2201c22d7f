"""Runs: several tokens of a chain in one call of the engine give the tokens of single forwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.core.drafter import DraftFormat
from services.engine.core.model import load_model
from services.engine.graph_engine import GraphEngine
from services.scheduling.tasks import Release
from services.speculation.proposals import RUN
from services.speculation.session import Speculation
from tests.support.draft_helpers import VOCAB, ChainingEngine, Drafter, TableEngine
from tests.support.engine_helpers import tiny_model

COUPLED, REJECTION, NAIVE = (
    VerificationMethod.COUPLED,
    VerificationMethod.REJECTION,
    VerificationMethod.NAIVE,
)
PROMPT = [1, 2, 3, 4]
GREEDY, PLAIN, COOL = (SamplingParams(temperature=temperature, seed=5) for temperature in (0.0, 1.0, 0.6))
PENALTIES = SamplingParams(temperature=0.9, frequency_penalty=1.5, repetition_penalty=1.2, seed=5)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """Return a function that makes engines on captured steps, run as they are, of one model."""
    directory = tiny_model("llama", tmp_path_factory.mktemp("model"), head_dim=16)
    loaded = load_model(str(directory), device="cpu")
    return lambda: GraphEngine.build(loaded)


@pytest.mark.parametrize("params", [GREEDY, PLAIN, COOL], ids=["greedy", "plain", "cool"])
def test_a_session_alone_is_drafted_in_runs(params, monkeypatch):
    ours, theirs = Drafter(ChainingEngine()), Drafter(TableEngine())
    counts = []
    monkeypatch.setattr(ours.engine, "chain", _counting(ours.engine.chain, counts))
    first = ours.ask(PROMPT, RUN + 3, params=params)
    assert first.outcome == theirs.ask(PROMPT, RUN + 3, params=params).outcome
    assert counts == [RUN, 2], "the prompt comes first"
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


def proposals(engine, count, params, method=COUPLED, max_nodes=0):
    """Return the proposals of sessions that ask at the same time, and the steps' numbers of forwards."""
    drafter, found, forwards = Drafter(engine), {}, []
    tokens = {f"s{index}": [*PROMPT, *range(index % 3), index] for index in range(count)}
    for _ in range(3):  # the last tokens differ, so later feeds have one token or two
        drafter.scheduler.submit(
            [
                drafter.task(
                    text,
                    4 + int(name[1:]) % 3,
                    max_nodes=max_nodes,
                    session_id=name,
                    params=params,
                    method=method,
                )
                for name, text in tokens.items()
            ]
        )
        while not drafter.scheduler.is_idle:
            for task, reply in drafter.scheduler.step():
                found[task.session_id, len(tokens[task.session_id])] = reply.outcome
            forwards.append(drafter.scheduler.num_forwards)
        for index, (name, text) in enumerate(tokens.items()):
            text += [*found[name, len(text)].token_ids[: 1 if max_nodes else 1 + index % 4], 90 + index]
    return found, forwards


@pytest.mark.parametrize("params", [GREEDY, PLAIN, COOL], ids=["greedy", "plain", "cool"])
@pytest.mark.parametrize("max_nodes", [0, 12], ids=["chains", "trees"])
def test_captured_steps_draft_all_sessions_on_the_device(max_nodes, params, graphs, monkeypatch):
    ours, together = proposals(graphs(), 5, params, max_nodes=max_nodes)
    monkeypatch.setattr(Speculation, "gumbel_draw", None)
    theirs, apart = proposals(graphs(), 5, params, max_nodes=max_nodes)
    if max_nodes:
        # A node offers at most one token of each stripe of ids: a few other runners-up.
        same = sum(ours[key].token_ids[0] == theirs[key].token_ids[0] for key in ours)
        assert same == len(ours)
        assert all(proposal.parents for proposal in ours.values())
        return
    assert ours == theirs
    assert sum(together) == sum(apart)
    assert max(together) >= 4
    assert together == [4, 1, 1] * 3, "a call for the shortest chains, and one for each that is longer"


def forwards_with_draft_ahead(ahead, fresh, params):
    """Return the forwards of each proposal of one session, whose draft foresees all."""
    tokens, forwards = list(PROMPT), []
    for _ in range(4):
        # What it would propose next is what the target emits.
        emitted = fresh.ask(tokens, 4, params=params).outcome.token_ids
        reply = ahead.ask(tokens, 3, params=params)
        assert reply.outcome.token_ids == emitted[:3]
        forwards.append(reply.timing.num_forwards)
        ahead.idle()
        tokens += emitted
    return forwards


@pytest.mark.parametrize("params", [GREEDY, PLAIN, COOL], ids=["greedy", "plain", "cool"])
def test_captured_steps_draft_ahead_on_the_device(params, graphs, monkeypatch):
    ahead = Drafter(graphs(), ahead_rows=3)
    with monkeypatch.context() as patched:
        patched.setattr(ahead.engine, "step", None)  # nothing takes logits
        ours = forwards_with_draft_ahead(ahead, Drafter(graphs()), params)
    monkeypatch.setattr(Speculation, "gumbel_draw", None)
    theirs = forwards_with_draft_ahead(Drafter(graphs(), ahead_rows=3), Drafter(graphs()), params)
    assert sum(ours) == sum(theirs) < 3 * len(ours)


def test_captured_steps_of_a_draft_with_fewer_tokens_give_tokens_of_the_target(graphs, monkeypatch):
    """Its rows are not the target's ids, so its choices need logits."""

    def engine():
        model = graphs().runner.model
        ids = torch.arange(1, model.shape.vocab_size, 2)
        small = replace(
            model, head=model.head[ids].contiguous(), shape=replace(model.shape, vocab_size=len(ids))
        )
        made = GraphEngine.of(small, name="reduced")
        made.draft_for(DraftFormat(model.shape.vocab_size, None, ids))
        return made

    ours, forwards = proposals(engine(), 3, PLAIN)
    assert set(forwards) == {1}
    tokens = [token for proposal in ours.values() for token in proposal.token_ids]
    assert all(token % 2 for token in tokens)
    monkeypatch.setattr(Speculation, "gumbel_draw", None)
    assert proposals(engine(), 3, PLAIN)[0] == ours


def test_captured_steps_with_a_filter_or_another_method_give_the_same_tokens(graphs, monkeypatch):
    filtered = SamplingParams(temperature=1.5, top_k=2, seed=5)
    kinds = ((filtered, COUPLED), (PENALTIES, COUPLED), (PLAIN, REJECTION))
    ours = [proposals(graphs(), 3, *kind)[0] for kind in kinds]
    monkeypatch.setattr(Speculation, "gumbel_draw", None)
    assert [proposals(graphs(), 3, *kind)[0] for kind in kinds] == ours


@pytest.mark.parametrize("params", [GREEDY, PLAIN, COOL], ids=["greedy", "plain", "cool"])
def test_confidence_of_drawn_tokens_is_that_of_their_scores(params, graphs, monkeypatch):
    found = []
    for _ in range(2):
        drafter = Drafter(graphs())
        drafter.ask(PROMPT, 5, params=params)
        node, seen = drafter.scheduler.speculations["s"].tree.root, []
        for _ in range(5):
            seen.append(node.prediction.confidence(4))
            node = node.child(node.prediction.choose(4))
        found.append(seen)
        monkeypatch.setattr(Speculation, "gumbel_draw", None)
    assert found[0] == pytest.approx(found[1], rel=1e-3)


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
        counts.append(len(token_ids))
        return token_ids, logits

    return counted
