"""Write the chart's Grafana dashboard, from the queries in docs/metric_queries.json.

python helm/dashboard.py            # write helm/gammaray/dashboards/gammaray.json
python helm/dashboard.py --check    # exit with 1 if the file is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUERIES = json.loads((Path(__file__).parents[1] / "docs" / "metric_queries.json").read_text())
PAGE = Path(__file__).parent / "gammaray" / "dashboards" / "gammaray.json"
WIDTH = 24
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """One query of a panel; Grafana replaces `$__rate_interval` by an interval for the visible range."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: What it shows.
        unit: Grafana's name of the unit.
        queries: Queries of its series.
        kind: timeseries, stat or heatmap.
        width: Columns, out of 24.
        text: Tooltip of the title.
        stacked: Whether to stack the series.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    width: int = 8
    text: str = ""
    stacked: bool = False


def _of(name: str, legend: str = "") -> Query:
    """Return the example query of a metric."""
    return Query(QUERIES[f"gammaray.{name}"]["query"].replace("[5m]", "[$__rate_interval]"), legend)


def _quantiles(family: str) -> tuple[Query, ...]:
    rate = f"rate(gammaray_{family}_seconds_bucket[$__rate_interval])"
    return tuple(
        Query(f"histogram_quantile({share:g}, sum by (le) ({rate}))", f"p{share * 100:g}")
        for share in (0.5, 0.95, 0.99)
    )


def _rate(sample: str, by: str) -> tuple[Query, ...]:
    return (Query(f"sum by ({by}) (rate({sample}[$__rate_interval]))", f"{{{{{by}}}}}"),)


def _heat(bucket: str) -> tuple[Query, ...]:
    return (Query(f"sum by (le) (increase({bucket}[$__rate_interval]))", "{{le}}"),)


def _stat(title: str, unit: str, query: Query) -> Panel:
    return Panel(title, unit, (query,), kind="stat", width=4)


_ROLE = "{{role}}"
_OVERVIEW = (
    _stat("Tokens per second", "short", _of("tokens")),
    _stat("Speedup over plain decoding", "x", _of("decode.time")),
    _stat("Alpha", "percentunit", _of("spec_decode.num_tested_tokens")),
    _stat("Requests in flight", "short", _of("requests.active")),
    _stat("Requests waiting", "short", _of("requests.waiting")),
    _stat("Error ratio", "percentunit", _of("requests")),
    Panel("Tokens per second by origin", "short", _rate("gammaray_tokens_total", "origin"), stacked=True),
    Panel(
        "Requests per second by outcome", "reqps", _rate("gammaray_requests_total", "outcome"), stacked=True
    ),
    Panel(
        "Connected workers",
        "short",
        (_of("workers", _ROLE),),
        text="Workers of the orchestrator that is connected to the fewest.",
    ),
)
_SPECULATION = (
    Panel(
        "Alpha",
        "percentunit",
        (_of("spec_decode.num_tested_tokens", "alpha"),),
        text="Accepted share of the tested proposed tokens.",
    ),
    Panel(
        "Tokens per cycle",
        "short",
        (_of("cycles", "emitted"), _of("cycle.gamma", "gamma")),
    ),
    Panel(
        "Speedup over plain decoding",
        "x",
        (_of("decode.time", "speedup"),),
        text="Below 1, drafting reduces the speed.",
    ),
    Panel("Gamma", "short", _heat("gammaray_cycle_gamma_bucket"), kind="heatmap"),
    Panel("Cycles per second by drafter", "short", _rate("gammaray_cycles_total", "rung"), stacked=True),
    Panel("Cycles without the requested drafter", "percentunit", (_of("cycle.fallbacks", "share"),)),
)
_LATENCY = (
    Panel("Time to first token", "s", _quantiles("time_to_first_token")),
    Panel("Time per output token", "s", _quantiles("time_per_output_token")),
    Panel("Gap between chunks", "s", _quantiles("inter_token_latency")),
    Panel("Completion", "s", _quantiles("request_duration")),
    Panel("Cycle time by phase", "percentunit", (_of("cycle.time", "{{part}}"),), stacked=True),
    Panel(
        "Gap between chunks, all", "s", _heat("gammaray_inter_token_latency_seconds_bucket"), kind="heatmap"
    ),
)
_WORKERS = (
    Panel(
        "Occupancy",
        "percentunit",
        (_of("worker.step.duration", _ROLE),),
        text="Fraction of time in which the engine runs.",
    ),
    Panel(
        "Queue", "short", (_of("worker.queue_depth", _ROLE),), text="Blocks waiting or running, per worker."
    ),
    Panel("Batch", "short", (_of("worker.step.blocks", _ROLE),), text="Sessions per step."),
    Panel("KV cache use, highest", "percentunit", (_of("worker.cache.used", _ROLE),)),
    Panel("Cached share of prompts", "percentunit", (_of("worker.prefix_cache.queries", _ROLE),)),
    Panel("Evictions per second", "short", (_of("worker.cache.evictions", _ROLE),)),
    Panel("Acceptance while learning", "percentunit", (_of("worker.drafter.first_tokens", "{{arm}}"),)),
    Panel(
        "Memory",
        "bytes",
        (
            Query(
                "max by (role) (process_resident_memory_bytes"
                " * on (instance) group_left (role) gammaray_info)",
                _ROLE,
            ),
        ),
    ),
)
ROWS = {
    "Overview": _OVERVIEW,
    "Speculation": _SPECULATION,
    "Latency": _LATENCY,
    "Workers": _WORKERS,
}


def render() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "uid": "gammaray",
        "title": "gammaray",
        "tags": ["gammaray", "llm"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {"id": number, "type": "row", "title": title, "gridPos": _place(0, top, WIDTH, 1), "panels": []}
        left, top = 0, top + 1
        for panel in panels:
            height = 4 if panel.kind == "stat" else 8
            number += 1
            yield _panel(number, panel, _place(left, top, panel.width, height))
            left += panel.width
            if left == WIDTH:
                left, top = 0, top + height


def _place(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    custom = {"fillOpacity": 20, "stacking": {"mode": "normal"}} if panel.stacked else {}
    options = {"calculate": False, "yAxis": {"unit": panel.unit}} if panel.kind == "heatmap" else {}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _DATASOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
    }


def main() -> int:
    """Write the dashboard, or check it; return the exit status."""
    text = json.dumps(render(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text)
        return 0
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    print(f"{PAGE.name} is stale: run `python helm/dashboard.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
