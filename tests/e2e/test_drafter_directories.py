"""`gammaray up` with an early exit of the target as the draft."""

import signal

import pytest

from gammaray import Client
from services.demo_pair import TARGET_DIR
from tests.support.cluster.cluster_helpers import is_without_model, running_cluster, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"


def ids(completion):
    return [token.token_id for token in completion.tokens]


def test_text_is_that_of_plain_decoding():
    with running_cluster("--target", str(TARGET_DIR), "--draft", "early-exit:8") as cluster:
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
