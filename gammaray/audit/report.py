"""An audit's findings as a table, as JSON, and as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from rich.console import Console
from rich.markup import escape as plain

from gammaray.audit.findings import Finding, Status
from gammaray.audit.run import overall
from gammaray.bench.svg import bar_chart
from gammaray.program.output import columns

_STYLES = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.INCONCLUSIVE: "yellow",
    Status.NOT_POSSIBLE: "dim",
}
_PAGE_STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:820px;
margin:2em auto;padding:0 1em}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2.2em}
table{border-collapse:collapse;font-size:.9em}
td,th{padding:.2em .8em .2em 0;text-align:right;border-bottom:1px solid #8884}
td:first-child,th:first-child{text-align:left}
.m{opacity:.7}code{word-break:break-word}svg{max-width:100%;height:auto}"""


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print the table, and for each failed check its evidence and the command that shows it."""
    table = columns(
        "check", "result", "requests", "tokens", "found", right=("requests", "tokens"), overflow="fold"
    )
    for found in findings:
        status = found.result.status
        shown = f"[{_STYLES[status]}]{status.value}[/]"
        table.add_row(found.check, shown, str(found.requests), str(found.tokens), plain(found.result.summary))
    console.print(table)
    for found in findings:
        if found.result.curl:
            console.print(f"\n{found.check}: {found.result.summary}", markup=False, soft_wrap=True)
            console.print(f"  {found.result.curl}", markup=False, soft_wrap=True)
    counts = [f"{sum(f.result.status is s for f in findings)} {s.value}" for s in Status]
    console.print(f"\n{overall(findings).value}: {', '.join(counts)}", markup=False)


def audit_result(findings: Sequence[Finding], **about: Any) -> dict[str, Any]:
    """Return the findings, JSON-ready, with what was audited."""
    checks = [asdict(found) for found in findings]
    for check in checks:
        check["result"]["status"] = check["result"]["status"].value
    return {**about, "result": overall(findings).value, "checks": checks}


def audit_page(found: dict[str, Any]) -> str:
    """Return the page of an `audit_result`: the table, evidence and commands, and charts of the law."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>gammaray audit</title>'
        f"<style>{_PAGE_STYLE}</style><body>{''.join(_body(found))}</body></html>\n"
    )


def _body(found: dict[str, Any]) -> Iterator[str]:
    checks: list[dict[str, Any]] = found["checks"]
    yield f"<h1>gammaray audit: {escape(found['result'])}</h1><p>{escape(found['url'])}, model "
    yield f"{escape(found['model'] or 'of the server')}<br>{escape(found['date_utc'])}</p>"
    yield "<table><tr><th>check</th><th>result</th><th>requests</th><th>tokens</th><th>found</th></tr>"
    for check in checks:
        result = check["result"]
        cells = (check["check"], result["status"], check["requests"], check["tokens"], result["summary"])
        yield f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
    yield "</table>"
    for check in checks:
        if curl := check["result"]["curl"]:
            yield f"<h2>{escape(check['check'])}</h2><p>{escape(check['result']['summary'])}</p>"
            yield f"<p><code>{escape(curl)}</code></p>"
    law: dict[str, Any] = next(
        (check["result"]["evidence"] for check in checks if check["check"] == "law"), {}
    )
    if law:
        yield from _law(law)
    yield bar_chart(
        "Tokens by check", [c["check"] for c in checks], {"tokens": [c["tokens"] for c in checks]}
    )


def _law(law: dict[str, Any]) -> Iterator[str]:
    bins = [found for found in law["by_probability"] if found["expected"] >= 5]
    yield "<h2>law</h2>"
    yield bar_chart(
        "Generated tokens over expected ones, by the probability that the server reports",
        [f"to {found['to']:g}" for found in bins],
        {"observed / expected": [found["observed"] / found["expected"] for found in bins]},
        base=1.0,
    )
    path = law["path"][:: max(1, len(law["path"]) // 12)]
    yield bar_chart(
        "Evidence against the server (log e-value, where above 0); the line is the alarm",
        [str(tokens) for tokens, _ in path],
        {"log e-value": [*(max(0.0, value) for _, value in path)], "alarm": [law["threshold"]] * len(path)},
        base=law["threshold"],
    )
