"""Pictures of result files: speedup by gamma, throughput by concurrency, where a cycle's time goes.

    python -m benchmarks.plots benchmarks/results/run-2026-01-31.json

Draws what each file holds, as PNG and SVG: the speedup with the theory's curve where gammas were measured,
throughput where there were several numbers of completions in flight, and the time split of a cycle.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.provenance import RESULTS
from gammaray.bench.compare import load_result
from gammaray.bench.measure import PLAIN
from gammaray.bench.optimum import chain_gammas
from gammaray.bench.rows import Row
from gammaray.bench.systems import stack_name
from gammaray.errors import InvalidArgumentError
from gammaray.maths.theory import expected_tokens

__all__ = ["draw", "plot_concurrency", "plot_cycle", "plot_speedup"]

Point = dict[str, Any]
Cost = dict[str, Any]

_ADAPTIVE = stack_name("adaptive")
# Okabe and Ito's colours, which colour-blind people can tell apart.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#666666"
_SKY, _RED = "#56B4E9", "#D55E00"
_TREE_SHIFT = 0.12
"""How far right of their depth trees are drawn, so that they do not cover the chain."""
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "svg.hashsalt": "gammaray",
}
_PARTS = (
    ("verify_ms", "target's forward", _BLUE),
    ("draft_ms", "draft's forwards", _SKY),
    ("worker_ms", "rest of the workers", _GREEN),
    ("wire_ms", "gRPC", _ORANGE),
    ("orchestrator_ms", "orchestrator, Redis, client", _RED),
)
_WAITS = (("verify", "verify", _BLUE), ("draft", "propose", _SKY), ("other", "other", _RED))


def draw(result: dict[str, Any], stem: str, out: Path) -> list[Path]:
    """Draw what `result` holds into `out`; return the files."""
    points: list[Point] = result["points"]
    alone = [point for point in points if point["concurrency"] == 1]
    figures: dict[str, Figure] = {}
    with plt.rc_context(_STYLE):
        if curves := [point for point in alone if point.get("optimum")]:
            figures["speedup"] = plot_speedup(curves, result.get("cycle_costs") or [])
        if len({point["concurrency"] for point in points}) > 1:
            figures["concurrency"] = plot_concurrency(points)
        if result.get("cycle_costs") or alone:
            figures["cycle"] = plot_cycle(result.get("cycle_costs") or [], alone)
        out.mkdir(parents=True, exist_ok=True)
        written = []
        for name, figure in figures.items():
            for kind, metadata in (("png", {}), ("svg", {"Date": None})):
                path = out / f"{stem}-{name}.{kind}"
                figure.savefig(path, dpi=160, metadata=metadata)
                written.append(path)
            plt.close(figure)
    return written


def plot_speedup(points: Sequence[Point], costs: Sequence[Cost]) -> Figure:
    """Draw speedup over gamma 0 by gamma, one panel per temperature: measured, and by the theory.

    Args:
        points: Points with one completion in flight.
        costs: Made by `probe.cycle_cost`; with them also what the model forwards alone would allow.
    """
    figure, panels = plt.subplots(
        1, len(points), figsize=(4.6 * len(points) + 0.6, 4.0), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, point in zip(panels[0], points, strict=True):
        _speedup_panel(axes, point, costs)
    panels[0][0].set_ylabel("speedup over plain decoding (γ = 0)")
    return figure


def _speedup_panel(axes: Axes, point: Point, costs: Sequence[Cost]) -> None:
    rows: list[Row] = point["rows"]
    by_name = {row["system"]: row for row in rows}
    best = point["optimum"]
    gammas = chain_gammas(rows)
    span = range(max(gammas) + 1)
    label = f"theory: k / (1 + 2L + γρ), α {best['alpha']:.2f}, ρ {best['draft_cost']:.2f}"
    axes.plot(span, best["speedup_predicted"][: len(span)], ".-", color=_BLUE, label=label)
    if curve := _forwards_curve(best["alpha"], costs, span):
        axes.plot(*curve, color=_GREY, linestyle="--", label="model forwards only, in sequence")
    measured = [by_name[stack_name(gamma)] for gamma in gammas]
    _ratios(axes, [float(gamma) for gamma in gammas], measured, color=_ORANGE, label="chains, measured")
    trees = [row for row in rows if "x" in row["system"].removeprefix(stack_name(""))]
    if trees:
        depths = [float(row["system"].removeprefix(stack_name("")).partition("x")[0]) for row in trees]
        shifted = [depth + _TREE_SHIFT for depth in depths]
        _ratios(axes, shifted, trees, color=_GREEN, marker="^", label="trees, measured (depth × nodes)")
        for at, row in zip(shifted, trees, strict=True):
            text = row["system"].removeprefix(stack_name("")).replace("x", "×")
            place = (at, row["over_plain"]["median"])
            axes.annotate(text, place, (7, 3), textcoords="offset points", color=_GREEN, fontsize=8)
    if _ADAPTIVE in by_name:
        height = by_name[_ADAPTIVE]["over_plain"]["median"]
        axes.axhline(height, color=_PURPLE, linestyle=":", label=f"adaptive, measured: {height:.2f}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_title(f"temperature {point['temperature']:g}")
    axes.set_xlabel("γ (draft tokens per cycle)")
    axes.set_xticks(list(span))
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8, loc="lower left")


def _forwards_curve(alpha: float, costs: Sequence[Cost], span: range) -> tuple[list[int], list[float]] | None:
    """Return the speedup that the probed forwards alone would allow, without working ahead."""
    chains = {int(cost["gamma"]): cost for cost in costs if cost["gamma"].isdecimal()}
    if 0 not in chains:
        return None
    plain = chains[0]["verify_ms"]
    gammas = [gamma for gamma in span if gamma in chains]
    return gammas, [
        expected_tokens(alpha, gamma) * plain / (chains[gamma]["draft_ms"] + chains[gamma]["verify_ms"])
        for gamma in gammas
    ]


def _ratios(axes: Axes, at: Sequence[float], rows: Sequence[Row], marker: str = "o", **style: Any) -> None:
    """Draw median speedups with a bar from the lowest to the highest repetition."""
    medians = [row["over_plain"]["median"] for row in rows]
    below = [median - min(row["over_plain"]["values"]) for median, row in zip(medians, rows, strict=True)]
    above = [max(row["over_plain"]["values"]) - median for median, row in zip(medians, rows, strict=True)]
    axes.errorbar(at, medians, (below, above), fmt=marker, capsize=3, elinewidth=1, **style)


def plot_concurrency(points: Sequence[Point]) -> Figure:
    """Draw throughput by completions in flight, and its ratio to gamma 0; one column per temperature."""
    temperatures = sorted({point["temperature"] for point in points})
    figure, panels = plt.subplots(
        2, len(temperatures), figsize=(4.6 * len(temperatures) + 0.6, 5.6), sharex=True, sharey="row",
        squeeze=False, layout="constrained", height_ratios=(3, 2),
    )  # fmt: skip
    for (above, below), temperature in zip(panels.T, temperatures, strict=True):
        chosen = sorted(
            (point for point in points if point["temperature"] == temperature),
            key=lambda point: point["concurrency"],
        )
        _concurrency_column(above, below, chosen)
        above.set_title(f"temperature {temperature:g}")
    panels[0][0].set_ylabel("tokens per second, all together")
    panels[1][0].set_ylabel("over γ = 0")
    return figure


def _concurrency_column(above: Axes, below: Axes, points: Sequence[Point]) -> None:
    names = dict.fromkeys(row["system"] for point in points for row in point["rows"])
    colors = {PLAIN: _GREY, _ADAPTIVE: _PURPLE}
    others = iter((_BLUE, _ORANGE, _GREEN, _SKY, _RED) * len(names))
    for name in names:
        color = colors.get(name) or next(others)
        found = [(p["concurrency"], r) for p in points for r in p["rows"] if r["system"] == name]
        at = [concurrency for concurrency, _ in found]
        label = name.removeprefix(stack_name(""))
        label = f"γ = {label}" if label.isdecimal() else label
        above.plot(at, [r["tokens_per_s"]["median"] for _, r in found], "o-", color=color, label=label)
        if name != PLAIN:
            _ratios(below, at, [row for _, row in found], marker="o-", color=color)
    below.axhline(1.0, color="black", linewidth=0.8)
    below.set_xlabel("completions in flight")
    below.set_xscale("log", base=2)
    ticks = sorted({point["concurrency"] for point in points})
    below.set_xticks(ticks, [str(tick) for tick in ticks])
    below.minorticks_off()
    above.set_ylim(bottom=0.0)
    above.legend(fontsize=8, loc="best")


def plot_cycle(costs: Sequence[Cost], points: Sequence[Point]) -> Figure:
    """Draw stacked bars of a cycle's time: probed parts by gamma, or what the orchestrator waited for."""
    if costs:
        # What working ahead hid is no part of the cycle.
        bars = [{**cost, "draft_ms": max(0.0, cost["forward_ms"] - cost["verify_ms"])} for cost in costs]
        return _bars([str(cost["gamma"]) for cost in costs], bars, _PARTS, "γ, or depth × nodes")
    rows = [row for row in points[0]["rows"] if row["speculation"]]
    names = [row["system"].removeprefix(stack_name("")) for row in rows]
    return _bars(names, [row["speculation"]["cycle_ms"] for row in rows], _WAITS, "γ")


def _bars(
    names: Sequence[str],
    bars: Sequence[dict[str, Any]],
    parts: Sequence[tuple[str, str, str]],
    xlabel: str,
) -> Figure:
    figure, axes = plt.subplots(figsize=(max(5.2, 0.8 * len(names) + 3.2), 4.0), layout="constrained")
    heights = [0.0] * len(names)
    for key, label, color in parts:
        values = [max(0.0, bar[key]) for bar in bars]
        drawn = axes.bar(names, values, bottom=heights, color=color, label=label, width=0.65)
        heights = [low + value for low, value in zip(heights, values, strict=True)]
        largest = max(heights)
        texts = [f"{value:.1f}" if value > 0.06 * largest else "" for value in values]
        ink = "black" if color in (_SKY, _ORANGE) else "white"
        axes.bar_label(drawn, texts, label_type="center", fontsize=8, color=ink)
    axes.set_xlabel(xlabel)
    axes.set_ylabel("milliseconds per cycle")
    axes.grid(visible=False, axis="x")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8)
    return figure


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Pictures of result files.")
    parser.add_argument("results", type=Path, nargs="+", help="written by benchmarks.run or gammaray bench")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the pictures")
    options = parser.parse_args()
    for path in options.results:
        try:
            result = load_result(path)
        except InvalidArgumentError as error:
            parser.error(str(error))
        for written in draw(result, path.stem, options.out):
            print(f"written: {written}")


if __name__ == "__main__":
    main()
