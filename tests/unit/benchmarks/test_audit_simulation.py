"""The simulation of audits bets as the tests that it stands for do."""

import math

import numpy as np
import pytest

from benchmarks.audit_simulation import FAULTS, HONEST, LISTED, Simulation, in_cells
from gammaray.audit.chance import ALPHA
from gammaray.audit.law import LOG_STAKES, LawTest

COUNT = 30


@pytest.fixture(scope="module")
def recorded():
    """Positions of 40 tokens; the draft's favourite is the target's second."""
    rng = np.random.default_rng(3)
    logits = -1.5 * np.log(np.arange(1, 41)) + rng.normal(0, 0.3, (COUNT, 40))
    logits[7] *= 20  # a certain one
    log_p = np.sort(logits - np.log(np.exp(logits).sum(1, keepdims=True)), axis=1)[:, ::-1]
    listed = [dict(enumerate(row)) for row in log_p[:, :LISTED].tolist()]
    tempered = np.exp(log_p / 0.9)
    laws = {
        "honest": np.exp(log_p)[:, :LISTED],
        "temperature 0.9": (tempered / tempered.sum(1, keepdims=True))[:, :LISTED],
    }
    return in_cells(listed, laws, [1] * COUNT)


@pytest.mark.parametrize("knows_draft", [False, True])
def test_simulated_test_equals_the_test_token_by_token(recorded, knows_draft):
    simulation = Simulation(recorded, 0.005, 10, knows_draft=knows_draft)
    rng, drafted = np.random.default_rng(4), 1 if knows_draft else None
    places = np.arange(300) % COUNT
    cells = simulation.draw(FAULTS[0], places, rng)
    values, _ = simulation.law_test(places, cells, np.array(LOG_STAKES))
    test = LawTest(0.005 * ALPHA["law"], LISTED)
    for place, cell, value in zip(places, cells, values, strict=True):
        tokens = [*recorded.positions[place].index, "another"]
        test.observe(tokens[cell], recorded.listed[place], drafted=drafted)
        assert test.log_e_value == pytest.approx(value, abs=1e-3)
    assert test.num_unreadable == 0


def test_laws_of_cells_are_those_of_the_server(recorded):
    for law in recorded.laws.values():
        assert law.sum(1) == pytest.approx(np.ones(COUNT))
    for position, law in zip(recorded.positions, recorded.laws["honest"], strict=True):
        assert position.probs == pytest.approx(law[: len(position.probs)])
    rng, places = np.random.default_rng(5), np.full(40_000, 3)
    simulation = Simulation(recorded, 0.005, 10)
    counts = np.bincount(simulation.draw(HONEST, places, rng), minlength=3) / len(places)
    assert counts[:3] == pytest.approx(recorded.laws["honest"][3, :3], abs=0.01)
    replaced = next(fault for fault in FAULTS if fault.share == 0.05 and fault.by == "draft")
    counts = np.bincount(simulation.draw(replaced, places, rng), minlength=3) / len(places)
    expected = 0.95 * recorded.laws["honest"][3, :3] + [0, 0.05, 0]
    assert counts[:3] == pytest.approx(expected, abs=0.01)


def test_faults_are_found_and_nothing_is_not(recorded):
    simulation, rng = Simulation(recorded, 0.005, 30), np.random.default_rng(6)
    needed, strongest = simulation.tokens_needed(FAULTS[0], 10_000, rng)
    assert 100 < needed < 5000
    assert strongest.startswith("temperature 0.9")
    assert simulation.tokens_needed(HONEST, 5000, rng) == (math.inf, "")
    assert simulation.pairs_needed(1.0, rng) < 20
    assert simulation.pairs_needed(0.0, rng) == math.inf
    assert 500 < simulation.tokens_for_power(FAULTS[0]) < 5000
    assert simulation.tokens_for_power(HONEST) == math.inf
