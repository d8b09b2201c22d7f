"""The bar chart of a speed benchmark: speed over gamma 0, as an SVG beside the result file."""

from __future__ import annotations

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
