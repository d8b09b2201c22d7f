"""`gammaray up` with a parallel draft model, and with an early exit of the target, as the draft."""

import json
import signal
from pathlib import Path

import pytest

from gammaray import Client
from services.demo_pair import DRAFT_DIR, TARGET_DIR
from tests.support.cluster.cluster_helpers import is_without_model, running_cluster, undisturbed
from tests.support.drafter_helpers import make_drafter

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"


@pytest.fixture
def draft(request, tmp_path):
    if request.param != "parallel":
        return request.param
    # The demo draft with an untrained mask: of a block, its first row is worth as much as ever.
    drafter = make_drafter(
        Path(DRAFT_DIR), tmp_path / "drafter", pard_token=10**6, mask_embedding=True, target=Path(TARGET_DIR)
    )
    assert json.loads((drafter / "config.json").read_text())["pard_token"] == 10**6
    return str(drafter)


def ids(completion):
    return [token.token_id for token in completion.tokens]


@pytest.mark.parametrize("draft", ["parallel", "early-exit:8"], indirect=True)
def test_text_is_that_of_plain_decoding(draft):
    with running_cluster("--target", str(TARGET_DIR), "--draft", draft) as cluster:
        with Client(cluster.grpc) as client:
            for temperature in (0.0, 1.0):

                def run(drafter, gamma, temperature=temperature, **options):
                    options |= {"seed": 7, "max_tokens": 64, "ignore_eos": True, "temperature": temperature}
                    return client.complete(PROMPT, drafter=drafter, gamma=gamma, **options)

                plain = run("none", 0)
                drafted = undisturbed(lambda: run("model", 5), is_without_model)
                assert ids(drafted) == ids(plain)
                assert drafted.summary.model_cycles > 0
                assert drafted.summary.accepted_tokens > 5
                assert ids(run("model", "adaptive")) == ids(plain)
        cluster.check_stop(signal.SIGINT)
