"""The best gamma from result rows: costs read off, prediction, memory."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import memory_overhead, model_memory
from gammaray.bench.optimum import Costs, optimum
from gammaray.maths.theory import expected_tokens, optimal_gamma
from gammaray.types import ProcessStatus
from services.demo_pair import DRAFT_DIR, TARGET_DIR

ALPHA, PLAIN_MS, STEP_MS, WAY_MS = 0.8, 10.0, 1.0, 0.5


def row(gamma: int, name: str = "") -> dict[str, Any]:
    """A chain whose cycle takes 10 ms, 1 ms more per draft token and 0.5 ms more per proposal."""
    tokens = expected_tokens(ALPHA, gamma)
    cycle = PLAIN_MS + STEP_MS * gamma + (WAY_MS if gamma else 0.0)
    # Survival as counts: many cycles of accepted length j, so that accepted / tested is alpha.
    passed = [round(1e6 * ALPHA**j * (1 - ALPHA)) for j in range(gamma)] + [round(1e6 * ALPHA**gamma)]
    return {
        "system": name or f"gammaray-{gamma}",
        "tokens_per_s": {"median": 1e3 * tokens / cycle, "values": []},
        "speculation": {
            "alpha": ALPHA if gamma else None,
            "accepted_lengths": passed,
            "tokens_per_cycle": tokens,
        },
        "between_tokens": {"mean_ms": cycle / tokens, "tokens_per_cycle": tokens},
    }


def test_optimum_fits_costs_to_the_cycles_and_predicts_the_best_gamma() -> None:
    found = optimum([row(gamma) for gamma in (0, 2, 4, 6, 8)])
    assert found is not None
    assert found["alpha"] == pytest.approx(ALPHA)
    assert found["plain_cycle_ms"] == pytest.approx(PLAIN_MS)
    assert found["draft_cost"] == pytest.approx(STEP_MS / PLAIN_MS)
    assert found["latency"] == pytest.approx(WAY_MS / PLAIN_MS / 2)
    assert found["gamma_predicted"] == optimal_gamma(ALPHA, 0.1, 0.025)
    assert found["gamma_measured"] == 6


def test_optimum_best_system_may_be_a_tree_but_not_a_baseline() -> None:
    fastest = row(8, name="gammaray-4x16")
    fastest["tokens_per_s"]["median"] = 1e6
    peer = {"system": "generate", "tokens_per_s": {"median": 1e9, "values": []}, "speculation": None}
    found = optimum([peer, row(0), row(2), fastest])
    assert found is not None
    assert found["best_system"] == "gammaray-4x16"
    assert found["gamma_measured"] == 2


@pytest.mark.parametrize("gammas", [(0,), (2, 4), ()])
def test_optimum_without_gamma_zero_or_a_chain_is_none(gammas: tuple[int, ...]) -> None:
    assert optimum([row(gamma) for gamma in gammas]) is None


def test_costs_of_one_gamma_are_all_draft_cost() -> None:
    costs = Costs.fit(10.0, [(4, 14.0)])
    assert (costs.draft_cost, costs.latency) == (pytest.approx(0.1), 0.0)


def test_model_memory_counts_tied_weights_once() -> None:
    memory = model_memory(str(TARGET_DIR), 4)
    # The file contains every weight once, in two bytes, after a header of some kilobytes.
    size = (TARGET_DIR / "model.safetensors").stat().st_size
    assert 2 * memory.parameters == pytest.approx(size, rel=0.002)
    assert memory.kv_bytes_per_token == 2 * 16 * 2 * 64 * 4
    assert memory.max_context == 2048


def test_memory_overhead_adds_draft_weights_draft_cache_and_proposal_slots() -> None:
    gone = ProcessStatus("draft", 2**22 + 1, "", "demo", True, 0)
    found = memory_overhead("demo", "demo", [gone], max_nodes=8)
    draft = model_memory(str(DRAFT_DIR), found["bytes_per_value"])
    slots = 8 * found["target"]["kv_bytes_per_token"]
    wanted = draft.weight_bytes + 2048 * draft.kv_bytes_per_token + slots
    assert found["delta_m_bytes"] == wanted
    assert found["draft"]["rss_bytes"] == []
