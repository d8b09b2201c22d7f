"""A few seconds of fuzzing: nothing hangs, breaks, leaks or is refused without a type."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from gammaray.v1 import generation_service_pb2 as pb
from tests.fuzz.campaign import Campaign
from tests.fuzz.census import Holding, growth
from tests.fuzz.fuzz_run import run
from tests.fuzz.limits import COMPLETION, Canary, Grower, Memory
from tests.fuzz.openapi_fuzz import SURFACE, schemathesis
from tests.fuzz.values import encode_json, mutate_bytes, mutate_json, mutate_message
from tests.support.cluster.cluster_helpers import Cluster
from tests.support.openapi_helpers import document

SEED = 11
TIMEOUT_S = 200.0


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_fuzzing_finds_nothing(cluster: Cluster):
    report = run(cluster, seconds=8, seed=SEED, say=print)
    print(report)
    assert report.is_clean, str(report)
    surfaces = {surface for surface, _ in report.campaign.counts}
    assert surfaces >= {"http", "grpc", "target stream", "draft stream", "hostile drafter", "hostile target"}


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing(cluster: Cluster):
    campaign = Campaign(0, SEED)
    options = ("--phases", "fuzzing", "--max-examples", "8", "--no-shrink")
    await schemathesis(cluster.http, campaign, SEED, TIMEOUT_S, *options)
    assert not campaign.num_wrong, "\n".join(campaign.wrong)
    assert campaign.counts[SURFACE, "generated"] > 0


async def test_schemathesis_finds_an_answer_that_is_not_as_documented():
    answers = {"/openapi.json": document(), "/health": {"status": "fine"}}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answers[self.path]).encode())

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    campaign = Campaign(0, SEED)
    try:
        options = ("--phases", "fuzzing", "--max-examples", "3", "--no-shrink", "--include-path", "/health")
        await schemathesis(f"http://127.0.0.1:{server.server_port}", campaign, SEED, TIMEOUT_S, *options)
    finally:
        server.shutdown()
        server.server_close()
    (found,) = campaign.wrong
    assert "GET /health" in found
    assert '"ok" was expected' in found


def test_fuzzer_choices_depend_on_the_seed_only():
    def story(seed):
        rng = Campaign(1, seed).dice("a")
        request = pb.GenerateRequest(text="x")
        mutate_message(rng, request)
        body = encode_json(rng, mutate_json(rng, {"prompt": ["x"], "n": 1}))
        return request.SerializeToString(deterministic=True), body, mutate_bytes(rng, b"abc")

    assert story(1) == story(1)
    assert len({story(seed) for seed in range(50)}) == 50


def test_census_reports_leftovers_and_growth():
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
        (complaint,) = growth({("proxy", 1): old}, {("proxy", 1): new})
        assert word in complaint
    for grown_mb, num_reported in ((300, 0), (350, 1)):  # a worker's caches fill
        new = Holding(**{**vars(old), "rss_mb": 100 + grown_mb})
        assert len(growth({("target", 1): old}, {("target", 1): new})) == num_reported
    assert growth({("target", 1): old}, {}) == ["target (process 1) is gone"]


class ScriptedCanary(Canary):
    """Has these longest gaps, one after another."""

    def __init__(self, gaps: list[float]) -> None:
        super().__init__()
        self.left = gaps

    async def settle(self) -> None:
        return

    async def longest_since(self, start: float) -> float:
        return self.left.pop(0)


@pytest.mark.parametrize(
    ("gaps", "is_found"),
    [
        ([0.1], False),
        ([0.4, 0.5], False),  # alone it waits as long
        ([0.4, 0.1, 0.2], False),  # not each time
        ([0.4, 0.3, 0.4, 0.3, 0.4, 0.35, 0.5, 0.1, 0.1], False),  # so does gamma 0
        ([0.6, 0.1, 0.5, 0.1, 0.4, 0.45], False),  # the machine itself waited longer than the least
        ([0.6, 0.1, 0.5, 0.3, 0.4, 0.1, 0.3, 0.1, 0.2], True),
    ],
)
async def test_canary_is_judged_by_what_it_waits_alone_and_beside_gamma_0(gaps, is_found):
    campaign, canary = Campaign(60, SEED), ScriptedCanary(gaps)
    transport = httpx.MockTransport(lambda request: httpx.Response(200))
    async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
        grower = Grower(http, canary, Memory(os.getpid()), campaign, alone_s=(0.0, 0.0))
        await grower.check(COMPLETION, "a field", {"prompt": "x"})
    assert canary.left == []
    assert bool(campaign.num_wrong) == is_found
