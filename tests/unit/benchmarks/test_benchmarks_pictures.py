"""Adaptive gamma compared with the best fixed shape, and the plots of result files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt

from benchmarks.adaptive import regret
from benchmarks.plots import draw, plot_concurrency, plot_cycle, plot_speedup
from gammaray.maths.theory import expected_tokens, speedup


def speeds(**systems: list[float]) -> list[dict[str, Any]]:
    """Rows with tokens per second by repetition."""
    return [
        {"system": f"gammaray-{name.removeprefix('g')}", "tokens_per_s": {"median": 0.0, "values": values}}
        for name, values in systems.items()
    ]


def test_regret_is_over_the_fixed_shape_with_the_best_median_within_each_repetition() -> None:
    found = regret(speeds(g2=[10.0, 30.0, 10.0], g4=[20.0, 20.0, 20.0], adaptive=[19.0, 18.0, 20.0]))
    assert found["best"] == "gammaray-4"
    assert found["ratio"]["values"] == pytest.approx((0.95, 0.9, 1.0))
    assert found["ratio"]["median"] == pytest.approx(0.95)


def test_regret_held_out_takes_the_shape_that_was_best_in_the_other_repetitions() -> None:
    # Each shape wins only by one lucky repetition, which must not count for it.
    found = regret(speeds(g2=[40.0, 10.0, 10.0], g4=[10.0, 40.0, 10.0], adaptive=[10.0, 10.0, 10.0]))
    assert found["held_out"]["values"] == pytest.approx((1.0, 1.0, 1.0))
    assert max(found["ratio"]["values"]) == 1.0
    assert min(found["ratio"]["values"]) == 0.25


def test_regret_single_repetition_has_nothing_to_hold_out() -> None:
    assert regret(speeds(g2=[10.0], adaptive=[9.0]))["held_out"] is None


def row(name: str, over_plain: float) -> dict[str, Any]:
    """A row as pictures need it."""
    return {
        "system": f"gammaray-{name}",
        "tokens_per_s": {"median": 100 * over_plain, "values": [100 * over_plain]},
        "over_plain": {"median": over_plain, "values": [0.9 * over_plain, over_plain, 1.1 * over_plain]},
        "speculation": {"cycle_ms": {"draft": 2.0, "verify": 5.0, "other": 1.0}},
    }


def point(concurrency: int = 1) -> dict[str, Any]:
    """Chains, a tree and adaptive under one load."""
    rows = [row(str(gamma), speedup(0.8, gamma, 0.1)) for gamma in (0, 2, 4)]
    rows += [row("4x12", 2.4), row("adaptive", 2.2)]
    return {
        "temperature": 0.0,
        "verification": "coupled",
        "concurrency": concurrency,
        "rows": rows,
        "optimum": {
            "alpha": 0.8,
            "draft_cost": 0.1,
            "speedup_predicted": [speedup(0.8, gamma, 0.1) for gamma in range(13)],
        },
    }


COST = {
    "gamma": "4",
    "forward_ms": 11.0,
    "verify_ms": 9.0,
    "draft_ms": 4.0,
    "worker_ms": 0.5,
    "wire_ms": 1.0,
    "orchestrator_ms": 0.5,
}


def test_plot_speedup_shows_measured_chains_on_the_theorys_curve() -> None:
    forwards = [("0", 0.0, 8.0), ("2", 2.0, 8.0), ("4", 4.0, 9.0), ("4x12", 6.0, 12.0)]
    costs = [dict(zip(("gamma", "draft_ms", "verify_ms"), f, strict=True)) for f in forwards]
    figure = plot_speedup([point()], costs)
    lines = {line.get_label(): line.get_xydata() for line in figure.axes[0].get_lines()}
    (theory,) = (xy for label, xy in lines.items() if "theory" in label)
    assert [tuple(xy) for xy in theory] == [(g, speedup(0.8, g, 0.1)) for g in range(5)]
    assert list(lines["model forwards only, in sequence"][1]) == [2.0, expected_tokens(0.8, 2) * 8 / 10]
    plt.close(figure)


def test_plot_concurrency_has_throughput_above_its_ratio_to_gamma_zero() -> None:
    figure = plot_concurrency([point(4), point(1), point(2)])
    above, below = figure.axes
    adaptive = next(line for line in above.get_lines() if line.get_label() == "adaptive")
    assert list(adaptive.get_xdata()) == [1, 2, 4]
    assert below.get_xscale() == "log"
    plt.close(figure)


def test_plot_cycle_counts_only_the_drafting_that_was_waited_for() -> None:
    figure = plot_cycle([COST], [])
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [9.0, 2.0, 0.5, 1.0, 0.5]
    plt.close(figure)


def test_draw_writes_what_the_result_holds_as_png_and_svg(tmp_path: Path) -> None:
    written = draw({"points": [point(1), point(2)], "cycle_costs": [COST]}, "r", tmp_path)
    names = [
        f"r-{kind}.{ending}" for kind in ("speedup", "concurrency", "cycle") for ending in ("png", "svg")
    ]
    assert [path.name for path in written] == names
    assert all(path.stat().st_size > 4000 for path in written)
    # A result of `gammaray bench` without several loads, gamma 0 or probed costs.
    bare = {**point(), "optimum": None}
    assert [path.name for path in draw({"points": [bare]}, "s", tmp_path)] == ["s-cycle.png", "s-cycle.svg"]


def test_draw_the_same_result_gives_the_same_svg(tmp_path: Path) -> None:
    result = {"points": [point()]}
    first, second = (draw(result, name, tmp_path)[-1].read_text() for name in "ab")
    assert first == second


def test_plots_other_file_ends_with_code_2_naming_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plots", str(path)],
        cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 2
    assert "x.json" in done.stderr
