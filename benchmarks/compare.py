"""Two result files of `benchmarks.run`, side by side.

    python -m benchmarks.compare results/old.json results/new.json

Tokens per second of different machines or days say little; the ratios within each file say more. Hence the
table shows both: new / old of the speed, and each file's own speed over plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import plain_table

__all__ = ["Pair", "compare", "warnings"]

Result = dict[str, Any]


class Pair:
    """The same system at the same temperature in two results."""

    def __init__(self, temperature: float, old: dict[str, Any], new: dict[str, Any]) -> None:
        self.temperature, self.system = temperature, str(old["system"])
        self.old_speed, self.new_speed = (r["tokens_per_s"]["median"] for r in (old, new))
        self.old_over_plain, self.new_over_plain = (_median(r["over_plain"]) for r in (old, new))

    @property
    def ratio(self) -> float:
        """New over old tokens per second."""
        return float(self.new_speed / self.old_speed)


def compare(old: Result, new: Result) -> list[Pair]:
    """Return what both results hold, in the old one's order.

    Raises:
        ValueError: They share nothing.
    """
    newer = {(temperature, row["system"]): row for temperature, row in _rows(new)}
    pairs = [
        Pair(temperature, row, newer[temperature, row["system"]])
        for temperature, row in _rows(old)
        if (temperature, row["system"]) in newer
    ]
    if not pairs:
        raise ValueError("the results have no system at the same temperature in common")
    return pairs


def warnings(old: Result, new: Result) -> list[str]:
    """Return what makes the two hard to compare, hardware, prompts and settings among it."""
    found = []
    hardware = [
        {k: v for k, v in r["provenance"]["hardware"].items() if k != "load_average"} for r in (old, new)
    ]
    if hardware[0] != hardware[1]:
        found.append(f"hardware differs: {hardware[0]} and {hardware[1]}")
    if old["workload_fingerprint"] != new["workload_fingerprint"]:
        found.append("the prompts differ")
    for key in sorted(old["settings"].keys() & new["settings"].keys()):
        if old["settings"][key] != new["settings"][key]:
            found.append(f"{key} differs: {old['settings'][key]} and {new['settings'][key]}")
    for name, result in (("old", old), ("new", new)):
        if (result["provenance"]["git"] or {}).get("dirty"):
            found.append(f"the {name} one was measured with uncommitted changes")
    return found


def _rows(result: Result) -> Iterator[tuple[float, dict[str, Any]]]:
    for table in result["temperatures"]:
        for row in table["rows"]:
            yield table["temperature"], row


def _median(ratio: dict[str, Any] | None) -> float | None:
    return None if ratio is None else float(ratio["median"])


def _table(pairs: list[Pair]) -> Table:
    columns = ("T", "system", "old", "new", "new / old", "old x gamma 0", "new x gamma 0")
    table = plain_table("Tokens per second", columns)
    for pair in pairs:
        over_plain = ("" if x is None else f"{x:.2f}" for x in (pair.old_over_plain, pair.new_over_plain))
        speeds = (f"{pair.old_speed:.1f}", f"{pair.new_speed:.1f}", f"{pair.ratio:.2f}")
        table.add_row(f"{pair.temperature:g}", pair.system, *speeds, *over_plain)
    return table


def main() -> None:
    """Command line of this module."""
    parser = argparse.ArgumentParser(description="Two result files of benchmarks.run, side by side.")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (options.old, options.new))
    console = Console()
    console.print(_table(compare(old, new)))
    for warning in warnings(old, new):
        console.print(f"note: {warning}")


if __name__ == "__main__":
    main()
