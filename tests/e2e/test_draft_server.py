"""`gammaray up --draft openai:URL`: the tests' cluster drafts for a second one, over HTTP."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from gammaray import Client, Completion
from tests.support.cluster.cluster_helpers import Cluster, num_fallbacks, running_cluster, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

PROMPT = "def read_lines(path):\n"


def ids_of(completion: Completion) -> list[int]:
    return [token.token_id for token in completion.tokens]


def is_unserved(completion: Completion) -> bool:
    """Whether the server was late in some cycle, or was never asked."""
    return num_fallbacks(completion) > 0 or completion.summary.server_cycles == 0


def test_cluster_that_drafts_for_another_one(cluster: Cluster, tmp_path: Path) -> None:
    with (
        open(tmp_path / "stderr", "w+") as log,
        running_cluster("--draft", f"openai:{cluster.http}", stderr=log.fileno()) as drafted,
        Client(drafted.grpc) as client,
        Client(cluster.grpc) as drafting,
    ):
        before = {session.session_id for session in drafting.list_sessions(1000)}
        for temperature in (0.0, 1.0):
            options = {"max_tokens": 48, "ignore_eos": True, "seed": 7, "temperature": temperature}
            plain = client.complete(PROMPT, gamma=0, **options)

            def speculate(options: dict[str, float] = options) -> Completion:
                return client.complete(PROMPT, gamma=4, drafter="server", **options)

            completion = undisturbed(speculate, is_unserved)
            assert ids_of(completion) == ids_of(plain)
            # The drafting cluster has the same target and noise: what it proposes is what is drawn.
            assert completion.summary.acceptance_rate == 1.0
        assert {session.session_id for session in drafting.list_sessions(1000)} == before
        (server,) = (process for process in drafted.status() if process.role == "draft")
        assert (server.model, server.kernel, server.healthy) == ("gammaray: demo", "token ids", True)
        rejection = {"gammaray": {"verification": "rejection"}}
        with drafted.openai() as http, pytest.raises(openai.BadRequestError, match="no draft distribution"):
            http.completions.create(model="demo", prompt=PROMPT, temperature=1, extra_body=rejection)
        log.seek(0)
        address = cluster.http.removeprefix("http://")
        assert f"the server at {address} drafts: gammaray, model demo" in log.read()
