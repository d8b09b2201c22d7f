"""`python -m services.receipts`: reads a CheckTask as JSON from stdin and writes a JSON object per line.

{"doing": "..."}                 the current step
{"verdict": {...}}               a ReceiptVerdict, one per receipt, in order
"""

from __future__ import annotations

import sys

from gammaray.receipts.verdicts import CheckTask
from services.process.json_lines import Report, serve_task
from services.receipts.check import ReceiptChecker


def main() -> int:
    """Check and return the exit code."""
    return serve_task(_check)


def _check(given: str, report: Report) -> None:
    task = CheckTask.model_validate_json(given)
    report("doing", f"loading the target {task.target}")
    checker = ReceiptChecker(task.target, task.margin)
    for number, receipt in enumerate(task.receipts, start=1):
        report("doing", f"checking receipt {number} of {len(task.receipts)}")
        report("verdict", checker.verdict(receipt).model_dump())


if __name__ == "__main__":
    sys.exit(main())
