"""Measurements: order, ratios, equality, gaps between tokens, loops, own prompts and charts."""

import asyncio
import random
import sys
import time
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from gammaray.bench.loops import loops_line, repeated_share, without_loops
from gammaray.bench.measure import PLAIN, Samples, Turn, differences, loads, measure
from gammaray.bench.prompts import NUM_PROMPTS, fingerprint, own_prompts
from gammaray.bench.provenance import provenance
from gammaray.bench.rows import gap_figures, gaps, row
from gammaray.bench.svg import bar_chart
from gammaray.bench.systems import Ask, Sample
from gammaray.errors import InternalError
from gammaray.types import SpeculationSummary

BASES = {"over_generate": "generate", "over_plain": PLAIN}

SUMMARY = SpeculationSummary(
    cycles=4, tokens_per_cycle=2.5, alpha=0.75, acceptance_rate=0.5, accepted_lengths=(1, 1, 1, 1),
    gamma_mean=3.0, draft_ms=8.0, verify_ms=40.0, other_ms=2.0, total_ms=50.0, speedup_estimate=None,
)  # fmt: skip


class FakeSystem:
    """Answers at once and notes in a shared list who was asked for what."""

    def __init__(self, name: str, cycle_log: list[tuple[str, str]]) -> None:
        self.name, self._cycle_log = name, cycle_log

    async def sample(self, ask: Ask) -> Sample:
        self._cycle_log.append((self.name, ask.prompt))
        return Sample((1, 2), 1.0)


class SlowSystem:
    """Answers with the seed after some ten milliseconds; counts who is in flight."""

    name = "slow"

    def __init__(self, failing_seed: int = -1) -> None:
        self.in_flight = self.most = 0
        self._failing_seed = failing_seed

    async def sample(self, ask: Ask) -> Sample:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        began = time.perf_counter()
        try:
            await asyncio.sleep(0.01)
            if ask.seed == self._failing_seed:
                raise InternalError("planted")
            return Sample((ask.seed,), time.perf_counter() - began)
        finally:
            self.in_flight -= 1


def turn(*made: Sample) -> Turn:
    """Completions one after the other."""
    return Turn(made, sum(sample.seconds for sample in made))


def samples(**seconds: list[float]) -> Samples:
    """One prompt per repetition, ten tokens each."""
    return {
        name.replace("_", "-"): [[turn(Sample(tuple(range(10)), s))] for s in values]
        for name, values in seconds.items()
    }


async def interleaved(names: str, repetitions: int, **options: Any) -> list[tuple[str, str]]:
    """Return who was asked for what, of systems with these names."""
    cycle_log: list[tuple[str, str]] = []
    ticks: list[None] = []
    systems = [FakeSystem(name, cycle_log) for name in names]
    asks = [Ask("p", 8), Ask("q", 8)]
    result = await measure(systems, asks, repetitions, lambda: ticks.append(None), **options)
    assert len(ticks) == 2 * len(names) * repetitions
    lengths = {name: [len(turns) for turns in found] for name, found in result.items()}
    assert lengths == dict.fromkeys(names, [2] * repetitions)
    return cycle_log


async def test_measure_interleaves_systems_prompt_by_prompt_in_rotating_order():
    found = await interleaved("ab", 2)
    assert found[:2] == [("a", "p"), ("b", "p")], "the warm-up"
    assert found[2:] == [("a", "p"), ("b", "p"), ("b", "q"), ("a", "q")] * 2


async def test_measure_draws_the_order_of_each_turn_from_the_seed():
    orders = []
    for seed in (1, 1, 2):
        found = await interleaved("abc", 4, shuffle=random.Random(seed))
        turns = [found[start : start + 3] for start in range(3, len(found), 3)]
        # Every turn holds all systems once, on the same prompt.
        assert [{system for system, _ in turn} for turn in turns] == [set("abc")] * 8
        assert [prompt for turn in turns for _, prompt in turn] == list("pppqqq") * 4
        orders.append(["".join(system for system, _ in turn) for turn in turns])
    assert orders[0] == orders[1] != orders[2]
    assert len(set(orders[0])) > 2


def test_row_takes_the_ratio_within_each_repetition():
    # The machine is three times slower in the second repetition; the ratio is 2 throughout.
    made = samples(generate=[2.0, 6.0, 2.0], gammaray_0=[4.0, 12.0, 4.0], gammaray_4=[1.0, 3.0, 1.0])
    figures = row("gammaray-4", made, BASES)
    assert figures["over_generate"]["values"] == pytest.approx((2.0, 2.0, 2.0))
    assert figures["over_plain"]["median"] == pytest.approx(4.0)
    assert figures["tokens_per_s"]["median"] == pytest.approx(10.0)
    assert figures["speculation"] is None


def test_row_joins_summaries_as_ratios_of_sums():
    # 9 of 18 tested and 6 of 6 tested: alpha is 15 / 24, not the mean of .5 and 1.
    poor = replace(SUMMARY, alpha=0.5, accepted_lengths=(9, 9), cycles=18, tokens_per_cycle=1.5)
    good = replace(SUMMARY, alpha=1.0, accepted_lengths=(0, 0, 0, 2), cycles=2, tokens_per_cycle=4.0)
    poor, good = replace(poor, gamma_mean=1.0), replace(good, gamma_mean=3.0)
    arrivals = (((0.25, 1), (0.5, 2)), ((0.75, 1), (1.0, 2)))
    made = [Sample((1,), 1.0, came, one) for came, one in zip(arrivals, (poor, good), strict=True)]
    figures = row("gammaray-4", {"gammaray-4": [[turn(*made)]]})
    speculation = figures["speculation"]
    assert speculation["cycles"] == 20
    assert speculation["accepted_lengths"] == [9, 9, 0, 2]
    assert speculation["alpha"] == pytest.approx(15 / 24)
    assert speculation["acceptance_rate"] == pytest.approx(15 / 24)
    assert speculation["tokens_per_cycle"] == pytest.approx(35 / 20)
    assert speculation["cycle_ms"] == {"draft": 0.8, "verify": 4.0, "other": 0.2, "total": 5.0}
    assert figures["first_token_ms"]["p50"] == pytest.approx(500.0)
    assert figures["between_tokens"]["mean_ms"] == pytest.approx(125.0)


def test_row_nothing_accepted_is_alpha_zero_and_nothing_drafted_is_none():
    wrong = replace(SUMMARY, alpha=0.0, accepted_lengths=(4,), tokens_per_cycle=1.0)
    plain = replace(wrong, alpha=None, acceptance_rate=None, gamma_mean=0.0)
    for summary, alpha in ((wrong, 0.0), (plain, None)):
        figures = row("gammaray-4", {"gammaray-4": [[turn(Sample((1,), 1.0, (), summary))]]})
        assert figures["speculation"]["alpha"] == alpha
        assert figures["speculation"]["acceptance_rate"] == alpha
        assert figures["between_tokens"] is None


def test_differences_names_system_prompt_and_first_different_token():
    same, other = Sample((1, 2, 3), 1.0), Sample((1, 9, 3), 1.0)
    made = {"generate": [[turn(same), turn(same)]], PLAIN: [[turn(same, other)]]}
    found = differences(made, {PLAIN: "generate"})
    assert (found["compared"], found["equal"]) == (2, 1)
    assert found["different"] == [{"system": PLAIN, "repetition": 0, "prompt": 1, "token": 1}]


async def test_measure_at_once_keeps_that_many_in_flight_and_times_the_whole():
    system = SlowSystem()
    result = await measure([system], [Ask("p", 8), Ask("q", 8)], 1, lambda: None, concurrency=4)
    (only,) = result["slow"][0]
    assert system.most == 4
    assert [sample.token_ids for sample in only.samples] == [(seed,) for seed in range(8)]
    assert only.seconds < sum(sample.seconds for sample in only.samples)


async def test_measure_at_once_a_failure_ends_the_turn_and_its_other_sessions():
    system = SlowSystem(failing_seed=1)
    with pytest.raises(InternalError):
        await measure([system], [Ask("p", 8)], 1, lambda: None, concurrency=3)
    await asyncio.sleep(0)
    assert system.in_flight == 0


def test_loads_gives_each_session_two_completions_under_their_own_seeds():
    asks = [Ask("p", 8, 1.0, 0), Ask("q", 8, 1.0, 1)]
    assert loads(asks, 1) == [[asks[0]], [asks[1]]]
    (load,) = loads(asks, 3)
    assert [(ask.prompt, ask.seed) for ask in load] == list(zip("pqpqpq", range(6), strict=True))


def test_gaps_within_a_chunk_are_zero_and_the_first_chunk_counts_as_first_token():
    assert gaps([(0.5, 3), (0.75, 1), (1.0, 3)]) == pytest.approx([0.25, 0.25, 0.0, 0.0])
    assert gaps([(0.5, 3)]) == []
    assert gaps([]) == []


def test_gap_figures_are_those_of_all_gaps_between_the_two_nearest():
    figures = gap_figures(
        [[(0.5, 1), (0.501, 1), (0.503, 1)], [(0.1, 1), (0.103, 1), (0.107, 1), (0.112, 1)]]
    )
    assert figures == pytest.approx({"mean_ms": 3.0, "p50_ms": 3.0, "p95_ms": 4.8, "p99_ms": 4.96})


READ = tuple(range(60))
LOOP = (1, 2, 3, 4, 5, 6, 7, 8) * 8


def texts(*token_ids: tuple[int, ...]) -> Turn:
    return turn(*(Sample(one, 1.0) for one in token_ids))


def test_repeated_share_counts_6_grams_that_occurred_before():
    assert repeated_share(()) == repeated_share((5,) * 6) == repeated_share(READ) == 0.0
    assert repeated_share((5,) * 7) == 0.5
    assert repeated_share(LOOP) == pytest.approx(1 - 8 / 59)
    assert repeated_share((*READ, *READ[:12])) == pytest.approx(7 / 67)


def test_turns_whose_plain_completion_is_a_loop_are_left_out_of_every_system():
    samples = {
        PLAIN: [[texts(READ), texts(LOOP)], [texts(READ), texts(LOOP)]],
        "other": [[texts(LOOP), texts(READ)], [texts(LOOP), texts(READ)]],
    }
    kept, loops = without_loops(samples)
    assert {name: [len(turns) for turns in found] for name, found in kept.items()} == {
        PLAIN: [1, 1],
        "other": [1, 1],
    }
    assert kept["other"][0][0].samples[0].token_ids == LOOP
    assert loops["kept"] == [0]
    assert loops["num_loops"] == 1
    assert loops["repeated_share"] == [[0.0], [pytest.approx(0.864, abs=1e-3)]]
    assert loops_line(loops) == "1 of 2 completions repeat themselves (loops): left out of the figures"


def test_figures_of_loops_alone_keep_them():
    kept, loops = without_loops({PLAIN: [[texts(LOOP), texts(LOOP)]]})
    assert len(kept[PLAIN][0]) == 2
    assert loops_line(loops) == "2 of 2 completions repeat themselves (loops): in the figures"
    assert loops_line(without_loops({PLAIN: [[texts(READ)]]})[1]) == ""


def test_prompts_are_different_take_turns_and_end_inside_a_line():
    rows = own_prompts(NUM_PROMPTS + 1)
    assert len({text for _, text in rows}) == len(rows) == NUM_PROMPTS
    assert [category for category, _ in rows] == ["code", "prose", "repetitive"] * (NUM_PROMPTS // 3)
    assert all(text and text == text.rstrip() for _, text in rows)
    assert own_prompts(2) == rows[:2]


def test_fingerprints_of_different_sets_differ():
    assert fingerprint(["a", "b"]) == fingerprint(["a", "b"])
    assert fingerprint(["a", "b"]) != fingerprint(["ab", ""])


@pytest.mark.parametrize("key", [["--api-key", "sk-1"], ["--api-key=sk-1"]])
def test_provenance_command_omits_the_key(key, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/gammaray", "bench", *key, "--tokens", "8"])
    command = provenance()["command"]
    assert "sk-1" not in command
    assert command.endswith("--tokens 8")


SVG = "{http://www.w3.org/2000/svg}"


def bars(svg: str) -> dict[str, float]:
    """Height of each bar of a chart, by the text that a mouse shows."""
    found = {}
    for rect in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        if (title := rect.find(f"{SVG}title")) is not None:
            found[str(title.text)] = float(rect.attrib["height"])
    return found


def test_bar_chart_heights_are_proportional_to_the_values():
    svg = bar_chart("Speed", ["a & b", "c"], {"one": [1.0, 2.0], "<two>": [None, 4.0]}, base=1.0)
    found = bars(svg)
    assert list(found) == ["one, a & b: 1.00", "one, c: 2.00", "<two>, c: 4.00"]
    assert found["one, c: 2.00"] == pytest.approx(2 * found["one, a & b: 1.00"], abs=0.2)
    assert found["<two>, c: 4.00"] == pytest.approx(4 * found["one, a & b: 1.00"], abs=0.3)
    assert "prefers-color-scheme:dark" in svg


@pytest.mark.parametrize("largest", [0.0, 0.003, 0.99, 1.0, 7.3, 1234.5])
def test_bars_stay_in_the_picture_at_every_scale(largest):
    root = ElementTree.fromstring(bar_chart("t", ["g"], {"s": [largest]}))
    (bar,) = (rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None)
    assert float(bar.attrib["y"]) >= 58 - 0.1
    assert 2 <= sum(path.attrib.get("class") == "g" for path in root.iter(f"{SVG}path")) <= 8
