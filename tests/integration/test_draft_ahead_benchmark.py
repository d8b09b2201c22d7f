"""The draft-ahead benchmark on the demo pair, small: it counts what is so, and the claim holds."""

import json

import pytest

from benchmarks import draft_ahead
from benchmarks.draft_ahead import Pair, Run
from gammaray.bench.workloads import prompts
from gammaray.types import VerificationMethod

pytestmark = [pytest.mark.integration, pytest.mark.slow]

COUPLED, REJECTION = VerificationMethod.COUPLED, VerificationMethod.REJECTION
TEXTS = prompts("mixed", 3)


@pytest.fixture(scope="module")
def pair():
    return Pair()


def test_demo_pair_tokens_do_not_depend_on_shape_or_ahead(pair):
    for temperature in (0.0, 1.0):
        plain = pair.run(Run(COUPLED, temperature, 0, 0, 0.0), TEXTS, 32)
        for gamma, max_nodes, window in ((4, 0, 2.0), (4, 12, 2.0), (6, 16, 0.0)):
            run = pair.run(Run(COUPLED, temperature, gamma, max_nodes, window), TEXTS, 32)
            assert run.tokens == plain.tokens
            assert run.emitted / run.cycles > 1.5
            assert (run.stats.lookups > 0) is (window > 0)


def test_demo_pair_trees_get_further_than_chains_at_temperature_one(pair):
    chain, tree = (pair.run(Run(COUPLED, 1.0, 4, nodes, 0.0), TEXTS, 64) for nodes in (0, 12))
    assert tree.emitted / tree.cycles > 1.1 * chain.emitted / chain.cycles
    assert tree.nodes / tree.cycles <= 12


def test_demo_pair_coupled_draft_ahead_hits_more_than_rejection(pair):
    """With all the time there is: what can be foreseen, not how fast this machine is.

    How much shared noise keeps of the greedy hits is the pair's, and so is how easily its draws are guessed.
    """
    greedy, coupled, rejection = (
        pair.run(Run(method, temperature, 2, 0, 1e9), TEXTS, 64).hit_rate
        for method, temperature in ((COUPLED, 0.0), (COUPLED, 1.0), (REJECTION, 1.0))
    )
    assert coupled > 0.8 * greedy
    assert rejection < 0.8 * coupled


def test_benchmark_writes_its_measurements(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(draft_ahead, "TEMPERATURES", (0.0, 1.0))
    monkeypatch.setattr(draft_ahead, "CHAINS", (2,))
    monkeypatch.setattr(draft_ahead, "TREES", ((2, 4),))
    out = tmp_path / "result.json"
    draft_ahead.main(["--prompts", "1", "--tokens", "8", "--out", str(out)])
    result = json.loads(out.read_text())
    assert [(r["method"], r["temperature"], r["max_nodes"], r["window"]) for r in result["runs"]] == [
        (method, temperature, max_nodes, window)
        for temperature, method, max_nodes in (
            (0.0, "coupled", 0),
            (0.0, "coupled", 4),
            (1.0, "coupled", 0),
            (1.0, "coupled", 4),
            (1.0, "rejection", 0),
        )
        for window in (0.0, 1.5)
    ]
    assert result["provenance"]["command"]
    assert "chain 2" in capsys.readouterr().out
