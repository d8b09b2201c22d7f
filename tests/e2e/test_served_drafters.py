"""`gammaray up` with a head in the target worker, and with a pair in bfloat16."""

import signal
from pathlib import Path

import pytest

from gammaray import Client
from gammaray.receipts.keys import rotate
from gammaray.receipts.receipt import SignedReceipt
from gammaray.types import DrafterKind, GammaPolicy
from services.demo_pair import TARGET_DIR
from services.receipts.check import ReceiptChecker
from tests.support.cluster.cluster_helpers import eventually, running_cluster
from tests.support.head_helpers import bigram_head

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), pytest.mark.nightly]

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
TARGET = ("--target", str(TARGET_DIR))


def run(client, drafter, gamma, temperature, **changes):
    options = changes | {"seed": 7, "max_tokens": 64, "ignore_eos": True, "temperature": temperature}
    return client.complete(PROMPT, drafter=drafter, gamma=gamma, **options)


def ids(completion):
    return [token.token_id for token in completion.tokens]


def test_text_drafted_by_a_head_is_that_of_plain_decoding(tmp_path):
    head = bigram_head(tmp_path / "head", Path(TARGET_DIR))
    with running_cluster(*TARGET, "--head", str(head)) as cluster:
        with Client(cluster.grpc) as client:
            assert "draft" not in {process.role for process in client.status()}
            for temperature in (0.0, 1.0):
                plain = run(client, "none", 0, temperature)
                assert plain.summary.head_cycles == 0
                for gamma in (4, GammaPolicy(fixed=4, max_nodes=16)):
                    drafted = run(client, "head", gamma, temperature)
                    assert ids(drafted) == ids(plain)
                    # Before the first cycle no hidden states are known, in the last one nothing is left.
                    assert drafted.summary.head_cycles >= drafted.summary.cycles - 2
                    assert drafted.summary.fallback_cycles == 0
                mixed = run(client, "model", "adaptive", temperature)
                assert ids(mixed) == ids(plain)
                kinds = {token.drafter for token in mixed.tokens}
                assert kinds <= {None, DrafterKind.HEAD, DrafterKind.SUFFIX}
            for method in ("rejection", "naive"):
                made = client.complete(PROMPT, drafter="head", gamma=3, verification=method, max_tokens=32)
                assert made.summary.head_cycles > 0

            def is_recorded():  # after the tokens are sent
                records = client.session_trace(made.session_id)
                return any(one.draft_ahead_hit for one in records if one.drafter is DrafterKind.HEAD)

            assert eventually(is_recorded)
        cluster.check_stop(signal.SIGINT)


def test_text_of_a_pair_in_bfloat16_is_that_of_plain_decoding(tmp_path):
    rotate(keys := tmp_path / "receipts.json")
    options = "--dtype", "bfloat16", "--receipt-keys-file", str(keys)
    with running_cluster(*options) as cluster, Client(cluster.grpc) as client:
        checker = ReceiptChecker("demo")
        for temperature in (0.0, 1.0):
            plain = run(client, "none", 0, temperature)
            drafted = run(client, "model", 4, temperature, receipt=True)
            assert ids(drafted) == ids(plain)
            assert drafted.summary.cycles < len(plain.tokens) / 2
            verdict = checker.verdict(SignedReceipt.parse(drafted.receipt).receipt)
            assert (verdict.result, verdict.dtype) == ("valid", "bfloat16"), verdict
