"""The bar chart of a speed benchmark: speed over gamma 0, as an SVG beside the result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gammaray.bench.svg import COLOURS, bar_chart
from gammaray.bench.systems import stack_name

ADAPTIVE = stack_name("adaptive")


def by_category(result: dict[str, Any], title: str) -> str:
    """Return a group of bars per category of prompts, a bar per temperature, of `benchmarks.peers`."""
    points = [point for point in result["points"] if point["concurrency"] == 1]
    categories = list(dict.fromkeys(point["category"] for point in points))
    series: dict[str, list[float | None]] = {}
    for point in points:
        name = f"temperature {point['temperature']:g}"
        series.setdefault(name, [None] * len(categories))
        for row in point["rows"]:
            if row["system"] == ADAPTIVE and row["decode_over_plain"]:
                series[name][categories.index(point["category"])] = row["decode_over_plain"]["median"]
    return bar_chart(title, categories, series, unit="x", base=1.0, colours=COLOURS[1:])


def by_gamma(result: dict[str, Any], title: str) -> str:
    """Return a group of bars per gamma, a bar per temperature, of `benchmarks.run`."""
    gammas = [row["system"].removeprefix(stack_name("")) for row in result["points"][0]["rows"]]
    series = {
        f"temperature {point['temperature']:g}": [row["over_plain"]["median"] for row in point["rows"]]
        for point in result["points"]
    }
    return bar_chart(title, gammas, series, unit="x", base=1.0, colours=COLOURS[1:])


def write_chart(path: Path, svg: str) -> Path:
    """Write a chart beside its result file; return the file."""
    chart = path.with_suffix(".svg")
    chart.write_text(svg)
    return chart
