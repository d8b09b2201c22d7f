"""Interleaving, ratios per repetition, equality, and what is left of a cycle beside the forwards."""

from __future__ import annotations

import math

import pytest

from benchmarks.measure import PLAIN, REFERENCE, Samples, differences, first_difference, measure, row
from benchmarks.probe import ProbedCycle, cycle_cost
from benchmarks.systems import Ask, Sample
from gammaray.types import SpeculationSummary

SUMMARY = SpeculationSummary(
    cycles=4,
    tokens_per_cycle=2.5,
    alpha=0.75,
    acceptance_rate=0.5,
    accepted_lengths=(1, 1, 1, 1),
    gamma_mean=3.0,
    draft_ms=8.0,
    verify_ms=40.0,
    other_ms=2.0,
    total_ms=50.0,
    speedup_estimate=None,
)


class FakeSystem:
    """Answers at once and notes in a shared list who was asked for what."""

    def __init__(self, name: str, journal: list[tuple[str, str]]) -> None:
        self.name, self._journal = name, journal

    async def sample(self, ask: Ask) -> Sample:
        self._journal.append((self.name, ask.prompt))
        return Sample((1, 2), 1.0)


def samples(**seconds: list[float]) -> Samples:
    """One prompt per repetition, ten tokens each."""
    return {
        name.replace("_", "-"): [[Sample(tuple(range(10)), s)] for s in values]
        for name, values in seconds.items()
    }


async def test_measure_interleaves_systems_prompt_by_prompt_in_rotating_order() -> None:
    journal: list[tuple[str, str]] = []
    systems = [FakeSystem(name, journal) for name in "ab"]
    ticks: list[None] = []
    result = await measure(systems, [Ask("p", 8), Ask("q", 8)], 2, lambda: ticks.append(None))
    warm_up, measured = journal[:2], journal[2:]
    assert warm_up == [("a", "p"), ("b", "p")]
    assert measured == [("a", "p"), ("b", "p"), ("b", "q"), ("a", "q")] * 2
    assert len(ticks) == 8
    assert {name: [len(r) for r in reps] for name, reps in result.items()} == {"a": [2, 2], "b": [2, 2]}


def test_row_takes_the_ratio_within_each_repetition() -> None:
    # The machine is three times slower in the second repetition; the ratio is 2 throughout.
    made = samples(generate=[2.0, 6.0, 2.0], gammaray_0=[4.0, 12.0, 4.0], gammaray_4=[1.0, 3.0, 1.0])
    figures = row("gammaray-4", made)
    assert figures["over_generate"]["values"] == pytest.approx((2.0, 2.0, 2.0))
    assert figures["over_plain"]["median"] == pytest.approx(4.0)
    assert figures["tokens_per_s"]["median"] == pytest.approx(10.0)
    assert figures["speculation"] is None


def test_row_without_the_base_system_has_no_ratio() -> None:
    figures = row("gammaray-4", samples(gammaray_4=[1.0]))
    assert figures["over_generate"] is None
    assert figures["over_plain"] is None


def test_row_joins_summaries_per_cycle() -> None:
    made = {"gammaray-4": [[Sample((1,), 1.0, 0.25, SUMMARY), Sample((1,), 1.0, 0.75, SUMMARY)]]}
    speculation = row("gammaray-4", made)["speculation"]
    assert speculation["cycles"] == 8
    assert speculation["accepted_lengths"] == [2, 2, 2, 2]
    assert speculation["alpha"] == pytest.approx(0.75)
    assert speculation["cycle_ms"] == {"draft": 2.0, "verify": 10.0, "other": 0.5, "total": 12.5}
    assert speculation["first_token_ms"] == pytest.approx(500.0)


def test_differences_names_system_prompt_and_first_different_token() -> None:
    same, other = Sample((1, 2, 3), 1.0), Sample((1, 9, 3), 1.0)
    made = {REFERENCE: [[same, same]], PLAIN: [[same, other]]}
    found = differences(made, {PLAIN: REFERENCE})
    assert (found["compared"], found["equal"]) == (2, 1)
    assert found["different"] == [{"system": PLAIN, "repetition": 0, "prompt": 1, "token": 1}]


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [((1, 2), (1, 2), None), ((1, 2), (3, 2), 0), ((1, 2), (1, 2, 3), 2), ((), (), None), ((1,), (), 0)],
)
def test_first_difference_is_an_index_or_the_shorter_length(
    left: tuple[int, ...], right: tuple[int, ...], wanted: int | None
) -> None:
    assert first_difference(left, right) == wanted


def test_cycle_cost_parts_add_up_to_the_cycle() -> None:
    probed = [ProbedCycle(4, wait_ms=20.0, compute_ms=18.0, forward_ms=17.0)] * 3
    cost = cycle_cost(4, [21.0, 22.0, 40.0], probed)
    assert cost["cycle_ms"] == 22.0
    parts = ("forward_ms", "worker_ms", "wire_ms", "orchestrator_ms")
    assert math.isclose(sum(cost[part] for part in parts), cost["cycle_ms"])
    assert cost["beside_ms"] == 5.0
    assert cost["beside_percent"] == pytest.approx(100 * 5 / 22)
