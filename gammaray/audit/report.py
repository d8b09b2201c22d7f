"""An audit's findings as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape

from gammaray.audit.findings import Finding, Status
from gammaray.audit.run import overall
from gammaray.cli.output import columns

_STYLES = {
    Status.PASSED: "green",
    Status.FAILED: "bold red",
    Status.INCONCLUSIVE: "yellow",
    Status.NOT_POSSIBLE: "dim",
}


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Print the table, and for each failed check its evidence and the command that shows it."""
    table = columns(
        "check", "result", "requests", "tokens", "found", right=("requests", "tokens"), overflow="fold"
    )
    for found in findings:
        status = found.result.status
        shown = f"[{_STYLES[status]}]{status.value}[/]"
        summary = escape(found.result.summary)
        table.add_row(found.check, shown, str(found.requests), str(found.tokens), summary)
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
