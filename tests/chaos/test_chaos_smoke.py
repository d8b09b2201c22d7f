"""Short chaos: every role is killed under every drafter and no token changes; the harness detects losses."""

import asyncio
import itertools
import json
from collections.abc import Iterable

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gammaray.deploy.redis_connection import reply_code
from tests.chaos.clients import Clients, History
from tests.chaos.load import Said, difference
from tests.chaos.network.troubles import troubles
from tests.chaos.redis_replies import REPLIES, replying
from tests.chaos.run import Options, complaints, run
from tests.chaos.spans import Measured, figures
from tests.chaos.stage import KINDS, ROLES, Stage, Trouble, revived_redis, stage_of
from tests.chaos.strikes import Blow, refusal, strike, strikes
from tests.support.workers.redis_helpers import wait_until

DEADLINE_S = 240.0
"""On a busy machine a replacement takes its time."""

FAULTS = ["client to gRPC: half-open, answers lost", "to one target: cut"]


def chaos(stage: Stage, plan: Iterable[Trouble], streams: int) -> Measured:
    options = Options(600, streams=streams, over_http=2, max_tokens=80, deadline_s=DEADLINE_S)
    outcome = asyncio.run(run(stage, options, plan))
    assert outcome.violations == []
    assert outcome.finished >= streams
    assert all(one.streams >= streams for one in outcome.results)
    assert json.loads(json.dumps(figures(outcome)))["violations"] == []
    return outcome


@pytest.mark.e2e
@pytest.mark.kills
@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_chaos_loses_repeats_and_changes_no_token():
    several = [("redis",), ("redis", "target"), ("proxy", "orchestrator", "draft")]
    kills = [strike(*map(Blow, roles)) for roles in several]
    plan = [*(refusal(code, 2.0) for code in REPLIES), *kills]
    with complaints() as stderr, stage_of(stderr=stderr) as stage:
        outcome = chaos(stage, plan, 2 * len(KINDS["model"]))
        assert {role for one in outcome.results for role in one.killed} == set(ROLES)
        faults = {one.name: one for one in troubles(stage)}
        outcome = chaos(stage, [faults[name] for name in FAULTS], 4)
    assert outcome.errors == {}
    # A cut link costs no more than a busy machine itself now and then; lost answers cost their five seconds.
    assert all(one.pause_s > outcome.usual_pause_s for one in outcome.results)


def test_strikes_depend_on_the_seed_only_and_befall_all_roles():
    first, again, other = (
        [(one.name, one.seconds) for one in itertools.islice(strikes(seed), 40)] for seed in (1, 1, 2)
    )
    assert first == again != other
    alone = {f"{role}, {action}" for role in ROLES for action in ("kill -9", "SIGSTOP")}
    others = {"several at once", "redis, SIGSTOP past a lease"}
    assert {name for name, _ in first[:25]} == {*alone, *others, *(f"redis, {code}" for code in REPLIES)}


@pytest.mark.integration
@pytest.mark.parametrize("code", REPLIES)
def test_redis_gives_each_error_reply_and_recovers(code):
    def reply() -> str | None:
        try:
            return client.set("tried", 1) and ""
        except redis.RedisError as error:
            return reply_code(error)

    with (
        revived_redis() as server,
        redis.Redis.from_url(server.url, socket_timeout=5, retry=Retry(NoBackoff(), 0)) as client,
    ):
        client.set("kept", 1)
        with replying(server, code):
            wait_until(lambda: reply() == code)
        wait_until(lambda: reply() == "")
        assert client.get("kept") == b"1"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((1, 2, 3), "3 tokens of 4, as far as they go the right ones"),
        ((1, 2, 3, 1, 2, 3, 4), "7 tokens of 4; from token 3 on (1, 2, 3, 4) instead of (4,)"),
        ((1, 2, 3, 4), "the tokens are right, the text is not"),
    ],
)
def test_lost_repeated_and_changed_tokens_are_told(said, words):
    assert difference(Said((1, 2, 3, 4), "abcd"), Said(said, "x")).startswith(words)


def test_late_and_lost_requests_are_violations():
    clients = Clients("", "", [], {}, 10.0, 0, may_fail=False)
    clients.histories = [
        History("right", 0.0, 1.0, 5),
        History("refused", 0.0, 1.0, 0, "ResourceExhaustedError"),
        History("wrong", 0.0, 1.0, 5, wrong="1 token of 5"),
        History("late", 0.0, 20.0, 5),
        History("lost", 0.0, 1.0, 5, "UnavailableError"),
    ]
    assert [one.partition(":")[0] for one in clients.violations()] == ["wrong", "late", "lost"]
