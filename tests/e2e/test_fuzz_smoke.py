"""A few seconds of fuzzing: nothing hangs, breaks, leaks or is refused without a type."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from cluster_helpers import Cluster

sys.path.append(str(Path(__file__).resolve().parents[1] / "fuzz"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "integration"))

from campaign import Campaign
from census import Holding, growth
from fuzz_run import run
from values import encode_json, mutate_bytes, mutate_json, mutate_message

from gammaray.v1 import generation_service_pb2 as pb

SEED = 11


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_fuzzing_finds_nothing(cluster: Cluster):
    report = run(cluster, seconds=8, seed=SEED, say=print)
    print(report)
    assert report.is_clean, str(report)
    surfaces = {surface for surface, _ in report.campaign.counts}
    assert surfaces >= {"http", "grpc", "target stream", "draft stream", "hostile drafter", "hostile target"}


def test_dice_decide_alone():
    def story(seed):
        rng = Campaign(1, seed).dice("a")
        request = pb.GenerateRequest(text="x")
        mutate_message(rng, request)
        body = encode_json(rng, mutate_json(rng, {"prompt": ["x"], "n": 1}))
        return request.SerializeToString(deterministic=True), body, mutate_bytes(rng, b"abc")

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(50)}) == 50


def test_mutated_json_is_mostly_json_and_never_the_same_for_long():
    rng, base = random.Random(0), {"prompt": "x", "logit_bias": {"1": 2}, "stop": ["a"]}
    bodies = [encode_json(rng, mutate_json(rng, base)) for _ in range(300)]
    assert len(set(bodies)) > 150
    assert base == {"prompt": "x", "logit_bias": {"1": 2}, "stop": ["a"]}
    readable = 0
    for body in bodies:
        try:
            json.loads(body.decode("utf-8"))
            readable += 1
        except (ValueError, RecursionError):
            continue
    assert readable > 200


def test_census_sees_what_is_left_and_what_has_grown():
    old = Holding(rss_mb=100, files=10, sessions=0, queued=0, cache_bytes=0)
    assert growth({("target", 1): old}, {("target", 1): old}) == []
    for change, word in (
        ({"rss_mb": 200}, "grown"),
        ({"files": 50}, "files"),
        ({"sessions": 1}, "sessions"),
        ({"queued": 2}, "queued"),
        ({"cache_bytes": 1}, "cache_bytes"),
    ):
        new = Holding(**{**vars(old), **change})
        (told,) = growth({("target", 1): old}, {("target", 1): new})
        assert word in told
    assert growth({("target", 1): old}, {}) == ["target (process 1) is gone"]
