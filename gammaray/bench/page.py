"""A result of `gammaray bench` as one self-contained HTML page, to look at rather than to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from gammaray.bench.loops import loops_line
from gammaray.bench.rows import Row
from gammaray.bench.svg import bar_chart
from gammaray.bench.systems import stack_name
from gammaray.bench.tables import SPEED

_STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:820px;
margin:2em auto;padding:0 1em}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2.2em}
table{border-collapse:collapse;font-size:.9em}
td,th{padding:.2em .8em .2em 0;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
.m{opacity:.7}code{word-break:break-word}svg{max-width:100%;height:auto}"""
_MAX_DEPTH = 16


def page(result: dict[str, Any]) -> str:
    """Return the page of a result of `run_bench` with its provenance: speed, acceptance by depth, latency."""
    found = result["provenance"]
    hardware = found["hardware"]
    models = ", ".join(f"{escape(role)}: {escape(model)}" for role, model in result["models"].items())
    gpu = f", {hardware['gpu']}" if hardware.get("gpu") else ""
    machine = escape(f"{hardware['cpu']}, {hardware['cores']} cores{gpu}")
    version = escape(found["versions"].get("gammaray", ""))
    body = [
        "<h1>gammaray bench</h1>",
        f"<p>{models or 'models unknown'}<br>client's machine: {machine}<br>"
        f"{escape(found['date_utc'])}, gammaray {version}"
        f"<br><code>{escape(found['command'])}</code></p>",
        '<p class="m">Speeds over gamma 0 (plain decoding through the same cluster) are medians of ratios '
        "within a repetition. Latencies are seen by the client.</p>",
    ]
    for point in result["points"]:
        body += _point(point)
    return document("gammaray bench", "".join(body))


def document(title: str, body: str) -> str:
    """Return a self-contained HTML page; `body` is markup."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><body>{body}</body></html>\n"
    )


def _point(point: dict[str, Any]) -> Iterator[str]:
    rows: list[Row] = point["rows"]
    names = [_label(row) for row in rows]
    yield f"<h2>Temperature {point['temperature']:g}</h2>"
    equality = point["equality"]
    yield f"<p>Same tokens as gamma 0: {equality['equal']} of {equality['compared']} completions.</p>"
    if line := loops_line(point["loops"]):
        yield f"<p>{escape(line)}.</p>"
    categories: dict[str, dict[str, float]] = point["categories"]
    groups = {"all": {row["system"]: row["over_plain"]["median"] for row in rows if row["over_plain"]}}
    groups |= categories if len(categories) > 1 else {}
    yield bar_chart(
        "Speed over gamma 0",
        list(groups),
        {
            name: [group.get(row["system"]) for group in groups.values()]
            for name, row in zip(names, rows, strict=True)
        },
        unit="x",
        base=1.0,
    )
    depths = {name: _survival(row) for name, row in zip(names, rows, strict=True) if _survival(row)}
    if depths:
        longest = max(map(len, depths.values()))
        yield bar_chart(
            "Cycles that accepted at least this many draft tokens",
            list(map(str, range(longest))),
            {name: [*shares, *[None] * (longest - len(shares))] for name, shares in depths.items()},
            unit="share",
        )
    latency: dict[str, list[float | None]] = {
        name: [
            *((row["first_token_ms"] or {}).get(key) for key in ("p50", "p99")),
            *((row["between_tokens"] or {}).get(key) for key in ("p50_ms", "p95_ms", "p99_ms")),
        ]
        for name, row in zip(names, rows, strict=True)
    }
    titles = ("first token p50", "first token p99", "gap p50", "gap p95", "gap p99")
    yield bar_chart("Latency", titles, latency, unit="ms")
    yield _table(names, rows)


def _survival(row: Row) -> list[float | None]:
    """Return by depth the share of cycles that accepted at least so many tokens; empty without drafts."""
    lengths = (row["speculation"] or {}).get("accepted_lengths", ())
    total = sum(lengths)
    if len(lengths) < 2 or not total:
        return []
    return [sum(lengths[depth:]) / total for depth in range(min(len(lengths), _MAX_DEPTH + 1))]


def _table(names: Sequence[str], rows: Sequence[Row]) -> str:
    columns = {heading: cell for heading, cell in SPEED.items() if heading != "system"}
    lines = ["".join(f"<th>{escape(text)}</th>" for text in ("", *columns))]
    for name, row in zip(names, rows, strict=True):
        cells = (name, *(cell(row) for cell in columns.values()))
        lines.append("".join(f"<td>{escape(text)}</td>" for text in cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _label(row: Row) -> str:
    name = str(row["system"]).removeprefix(stack_name(""))
    return f"gamma {name}" if name[:1].isdigit() else name
