"""Comparison of two result files of `gammaray bench` or `benchmarks.run`.

Tokens per second from different machines or days are hardly comparable; ratios within one file are. The table
therefore shows both: the ratio new / old of the speed, and each file's own speedup over plain decoding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from gammaray.bench.tables import plain_table
from gammaray.errors import InvalidArgumentError

__all__ = ["Pair", "compare", "comparison_table", "load_result", "warnings"]

Result = dict[str, Any]
Key = tuple[float, str, int, str]
"""Temperature, verification, concurrency and system."""


class Pair:
    """The same system under the same load in two results."""

    def __init__(self, key: Key, old: dict[str, Any], new: dict[str, Any]) -> None:
        self.temperature, self.verification, self.concurrency, self.system = key
        self.old_speed, self.new_speed = (r["tokens_per_s"]["median"] for r in (old, new))
        self.old_over_plain, self.new_over_plain = (_median(r["over_plain"]) for r in (old, new))

    @property
    def ratio(self) -> float:
        """New over old tokens per second."""
        return float(self.new_speed / self.old_speed)


def load_result(path: Path) -> Result:
    """Return a result file's content.

    Raises:
        InvalidArgumentError: The file is not a result file.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("result", f"{path}: {error}", "a JSON file") from None
    if not isinstance(result, dict) or not result.keys() >= {"provenance", "settings", "points"}:
        allowed = "a file written by `gammaray bench --json` or benchmarks.run"
        raise InvalidArgumentError("result", str(path), allowed)
    return result


def compare(old: Result, new: Result) -> list[Pair]:
    """Return the systems and loads that both results hold, in the old result's order.

    Raises:
        InvalidArgumentError: The results have no system and load in common.
    """
    newer = dict(_rows(new))
    pairs = [Pair(key, row, newer[key]) for key, row in _rows(old) if key in newer]
    if not pairs:
        got = "no common rows"
        raise InvalidArgumentError("results", got, "two files with a system under the same load")
    return pairs


def warnings(old: Result, new: Result) -> list[str]:
    """Return the differences that limit the comparison, such as hardware, prompts and settings."""
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


def comparison_table(pairs: list[Pair]) -> Table:
    """Return the pairs as a table for the terminal."""
    columns = ("T", "N", "system", "old", "new", "new / old", "old x gamma 0", "new x gamma 0")
    table = plain_table("Tokens per second (N completions in flight)", columns)
    for pair in pairs:
        over_plain = ("" if x is None else f"{x:.2f}" for x in (pair.old_over_plain, pair.new_over_plain))
        load = (f"{pair.temperature:g}", str(pair.concurrency))
        system = pair.system if pair.verification == "coupled" else f"{pair.system} {pair.verification}"
        speeds = (f"{pair.old_speed:.1f}", f"{pair.new_speed:.1f}", f"{pair.ratio:.2f}")
        table.add_row(*load, system, *speeds, *over_plain)
    return table


def _rows(result: Result) -> Iterator[tuple[Key, dict[str, Any]]]:
    for point in result["points"]:
        for row in point["rows"]:
            load = (point["temperature"], point["verification"], point["concurrency"])
            yield (*load, row["system"]), row


def _median(ratio: dict[str, Any] | None) -> float | None:
    return None if ratio is None else float(ratio["median"])
