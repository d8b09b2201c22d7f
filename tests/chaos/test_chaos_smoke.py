"""Short chaos: every role is killed under every drafter and no token changes; the harness detects losses."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from transformers import AutoTokenizer

from gammaray.demo_pair import resolve_model
from gammaray.deploy.redis_connection import reply_code
from tests.chaos.chaos_clusters import KINDS, Scene, started
from tests.chaos.chaos_drafters import PAIR, VOCABULARY, unused
from tests.chaos.chaos_redis import chaos_redis
from tests.chaos.load import Said, Tally, asks, difference, streams
from tests.chaos.network import network_run
from tests.chaos.network.network_run import NetworkOptions, links_to
from tests.chaos.network.troubles import Stage
from tests.chaos.other_vocabulary import with_fewer_merges
from tests.chaos.pauses import Event, pause_s, rows
from tests.chaos.report import tracebacks
from tests.chaos.run import Options, Outcome, run
from tests.chaos.victims import EVERYWHERE, ROLES, SPECIAL, Action, plan

SEED = 12
"""Whose first eight strikes kill every role and have Redis demoted, full, busy and loading."""

VOCABULARY_SEED = 23
"""Whose first two strikes kill a draft worker and a target worker, if these are the only roles."""


SMOKE = Options(
    seconds=600,
    seed=SEED,
    streams=2 * len(PAIR),
    max_tokens=80,
    stop_s=(0.5, 2.0),
    max_strikes=8,
    move_timeout_s=60.0,
    resume_s=240.0,
)
"""On a busy machine a replacement takes its time: eight strikes it must be, each on a cluster that serves."""


NETWORK = NetworkOptions(
    streams=4, over_http=2, max_tokens=80, names=("client to gRPC: half-open, answers", "to one target: cut")
)


def chaos(
    name: str, options: Options, tmp_path: Path, after: Callable[[Scene], object] = lambda _: None
) -> Outcome:
    """Run chaos on a cluster of a kind, then `after`; its complaints are printed if that fails."""
    with open(tmp_path / "complaints", "w") as complaints:  # Ray tells of every death
        try:
            with started(name, complaints.fileno()) as scene:
                outcome = asyncio.run(run(scene, options, print))
                if outcome.tally.lost:
                    print(tracebacks())
                after(scene)
        except BaseException:
            print((tmp_path / "complaints").read_text()[-4000:])
            raise
    assert outcome.tally.lost == []
    assert outcome.tally.wrong == []
    assert outcome.tally.finished >= options.streams
    assert outcome.unused == []
    return outcome


@pytest.mark.e2e
@pytest.mark.kills
@pytest.mark.timeout(1200)
def test_chaos_loses_repeats_and_changes_no_token(tmp_path):
    outcome = chaos("model", SMOKE, tmp_path, after=network_chaos)
    assert {role for event in outcome.events for role in event.killed} == set(ROLES)


def network_chaos(scene: Scene) -> None:
    """Two faults of networks on a cluster: every stream has the tokens of plain decoding, and no error."""
    cluster = scene.cluster
    stage = Stage(scene.network, None, links_to(cluster, scene.network), cluster.launcher.pid, None)
    outcome = asyncio.run(network_run.run(stage, cluster, NETWORK, print))
    assert outcome.violations == []
    assert sorted(one.name for one in outcome.results) == [
        "client to gRPC: half-open, answers lost",
        "to one target: cut",
    ]
    assert all(one.streams >= 6 and one.pause_s > outcome.usual_pause_s for one in outcome.results)
    assert outcome.finished == outcome.requests


@pytest.mark.e2e
@pytest.mark.kills
@pytest.mark.timeout(600)
def test_chaos_with_a_draft_of_another_vocabulary_changes_no_token(tmp_path):
    changes = {"seconds": 300, "seed": VOCABULARY_SEED, "streams": 2 * len(VOCABULARY)}
    options = replace(SMOKE, **changes, stop_s=(0.5, 1.0), max_strikes=2, roles=("draft", "target"))
    outcome = chaos("vocabulary", options, tmp_path)
    assert [event.killed for event in outcome.events] == [("draft",), ("target",)]


def test_every_way_to_draft_has_a_greedy_and_a_sampled_stream():
    for kind in KINDS.values():
        made = streams(asks(Options.streams, 8), kind.ways)
        found = {(stream.way.name, stream.ask.temperature) for stream in made}
        assert found == {(way.name, temperature) for way in kind.ways for temperature in (0.0, 1.0)}
    assert {drafter for way in PAIR for drafter in way.drafters} == {"model", "suffix", "prediction"}


def test_prediction_lacks_tokens_and_salts_of_ways_without_past_outputs_differ():
    by_name = {way.name: way for way in PAIR}
    expected = list(range(100))
    prediction = by_name["prediction"].request(expected)["prediction"]
    assert set(prediction) < set(expected)
    assert len(prediction) > 90
    salts = [way.request(expected)["cache_salt"] for way in PAIR for _ in range(2)]
    kept = [way for way in PAIR if way.keeps_outputs]
    assert len(set(salts)) == len(salts) - len(kept)


def test_drafter_that_never_proposed_is_reported():
    cycles = {way.name: Counter(way.drafters) for way in PAIR}
    assert unused(PAIR, cycles) == []
    cycles["model + prediction"]["prediction"] = 0
    assert unused(PAIR, cycles) == ["model + prediction: prediction proposed in no cycle"]
    assert not Outcome(Tally(finished=1), unused=["x"]).is_clean
    assert Outcome(Tally(finished=1)).is_clean


def test_model_with_fewer_merges_has_another_vocabulary_for_the_same_text(tmp_path):
    source = Path(resolve_model("demo", "target"))
    before = AutoTokenizer.from_pretrained(source)
    after = AutoTokenizer.from_pretrained(with_fewer_merges(source, tmp_path / "other"))
    text = "def replace_all(target, full):\n    return eventually(target)  # ünïcödé\n"
    assert after.decode(after(text)["input_ids"]) == text
    assert len(after(text)["input_ids"]) > len(before(text)["input_ids"])
    shared = before.get_vocab().keys() & after.get_vocab().keys()
    assert len(shared) == len(after.get_vocab()) < len(before.get_vocab())
    moved = sum(before.get_vocab()[token] != after.get_vocab()[token] for token in shared)
    assert moved > 0.9 * len(shared)
    assert after.eos_token_id == before.eos_token_id


def test_chaos_plan_depends_on_the_seed_only_and_covers_all_roles():
    first, second, other = (
        list(itertools.islice(plan(seed, (0, 1), (0, 1)), 40)) for seed in (SEED, SEED, 4)
    )
    assert first == second != other
    struck = {(blow.role, blow.action) for strike in first[:26] for blow in strike.blows}
    assert struck == {(role, action) for role in ROLES for action in (*EVERYWHERE, *SPECIAL.get(role, ()))}
    assert {action for _, action in struck} == set(Action)
    assert any(len(strike.blows) == len(ROLES) for strike in first[:26])
    assert all(len({blow.role for blow in strike.blows}) == len(strike.blows) for strike in first)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("trouble", "code"),
    [
        pytest.param(lambda chaos: chaos.demote(0.5), "READONLY", id="demoted"),
        pytest.param(lambda chaos: chaos.fill(0.5), "OOM", id="full"),
        pytest.param(lambda chaos: chaos.occupy(0.5), "BUSY", id="busy"),
        pytest.param(lambda chaos: chaos.kill_full(), "LOADING", id="loading"),
    ],
)
def test_chaos_redis_gives_each_error_reply_and_recovers(trouble, code):
    seen = set()
    with chaos_redis() as chaos:
        strike = threading.Thread(target=trouble, args=[chaos])
        client = redis.Redis.from_url(chaos.server.url, retry=Retry(NoBackoff(), 0))
        client.set("kept", 1)
        strike.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (strike.is_alive() or code not in seen):
            try:
                client.set("tried", 1)
            except redis.RedisError as error:
                seen.add(reply_code(error))
        strike.join()
        assert code in seen
        while time.monotonic() < deadline:  # LOADING ends by itself
            try:
                client.set("tried", 2)
                break
            except redis.RedisError:
                time.sleep(0.05)
        assert (client.get("kept"), client.get("tried")) == (b"1", b"2")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        pytest.param((1, 2, 3), "3 tokens of 4, as far as they go", id="lost"),
        pytest.param((1, 2, 2, 3, 4), r"5 tokens of 4; from token 2 on \(2, 3, 4\)", id="repeated"),
        pytest.param((1, 9, 3, 4), r"from token 1 on \(9, 3, 4\) instead of \(2, 3, 4\)", id="changed"),
    ],
)
def test_chaos_reports_lost_and_wrong_streams(said, words):
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(difference(Said((1, 2, 3, 4), "abcd"), Said(said, "abcd")))
    assert "text is not" in difference(Said((1,), "a"), Said((1,), "aa"))


@pytest.mark.parametrize(
    ("arrivals", "following", "expected"),
    [
        pytest.param([1, 2, 9.9, 10.1, 14, 15], math.inf, 3.9, id="gap-after-it"),
        pytest.param([1, 2, 9, 14, 15], math.inf, 4.0, id="gap-around-it-counts-from-it"),
        pytest.param([9.9, 10.1, 10.3, 10.5, 10.7, 19], math.inf, 0.2, id="later-gap-is-not-its-doing"),
        pytest.param([1, 2], math.inf, 0.0, id="ended-before"),
        pytest.param([9.9, 10.1, 10.4, 18], 10.45, 0.3, id="recovered-before-the-next-one"),
        pytest.param([9.9, 10.1, 18], 15, 7.9, id="not-recovered-before-the-next-one"),
        pytest.param([9.9, 10.1, 10.2, 18], 10.45, 7.8, id="tokens-under-way-are-no-recovery"),
        pytest.param([9.9, 13, 14, 30], 15, 3.0, id="next-one-comes-later"),
    ],
)
def test_pause_is_the_longest_gap_that_the_strike_caused(arrivals, following, expected):
    assert pause_s(arrivals, 10.0, following) == pytest.approx(expected)


def test_rows_hold_medians_and_maxima_by_victim():
    events = [
        Event("target, kill -9", 0.0, ("target",), 0.0, 2.0, (1.0, 3.0)),
        Event("target, kill -9", 10.0, ("target",), 0.0, 16.0, (1.0, 0.5)),
        Event("redis, SIGSTOP", 20.0, (), 1.5, None, (2.0,)),
        Event("redis, SIGSTOP", 21.0, (), 1.5, None, (30.0,), is_calm=False),
    ]
    redis, target = rows(events)
    assert (redis.strikes, redis.calm) == (2, 1)
    assert (redis.kills, redis.pause_max_s, redis.back_max_s, redis.stop_median_s) == (0, 2.0, None, 1.5)
    assert (target.strikes, target.kills, target.pause_median_s, target.pause_max_s) == (2, 2, 2.0, 3.0)
    assert (target.back_median_s, target.back_max_s, target.late_max_s) == (4.0, 6.0, 1.0)
