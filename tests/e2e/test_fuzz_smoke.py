"""A few seconds of fuzzing: nothing hangs, breaks, leaks or is refused without a type."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.fuzz.campaign import Campaign
from tests.fuzz.fuzz_run import run
from tests.fuzz.openapi_fuzz import SURFACE, schemathesis
from tests.support.openapi_helpers import document

SEED = 11
TIMEOUT_S = 200.0


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_fuzzing_finds_nothing(cluster):
    report = run(cluster, seconds=8, seed=SEED, say=print)
    print(report)
    assert report.is_clean, str(report)
    surfaces = {surface for surface, _ in report.campaign.counts}
    assert surfaces >= {"http", "grpc", "target stream", "draft stream", "hostile drafter", "hostile target"}


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_schemathesis_finds_nothing(cluster):
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
