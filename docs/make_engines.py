"""Make the table of engines in docs/models.md of `gammaray.engines`.

python docs/make_engines.py            # write
python docs/make_engines.py --check    # exit with 1 when the page is not what would be written
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from gammaray.engines import ENGINES, EngineFacts, Values

PAGE = Path(__file__).parent / "models.md"
BEGIN, END = "<!-- made of gammaray/engines.py by docs/make_engines.py -->\n", "<!-- end -->\n"


ROWS: dict[str, Callable[[EngineFacts], str]] = {
    "where": lambda facts: facts.where,
    "models": lambda facts: facts.models,
    "heads in the target": lambda facts: facts.heads,
    "proposals": lambda facts: "chains and trees" if facts.takes_trees else "chains",
    "`deterministic`": lambda facts: _values(facts.deterministic),
    "`learn`": lambda facts: "each tenant's streams" if facts.learns_by_tenant else "without API keys",
    "`gammaray check`": lambda facts: "yes" if facts.checks_receipts else "by `transformers`",
}
"""Rows beside those of the settings that an engine limits; "where" stands for `device`."""


def _limits(facts: EngineFacts, setting: str) -> str:
    allowed = facts.serves.get(setting)
    return "any" if allowed is None else "no" if allowed in (("",), (1,)) else " or ".join(map(str, allowed))


def _values(values: Values) -> str:
    if "engine" in values:
        return "no"
    return "; ".join(f"{setting} {' or '.join(map(str, allowed))}" for setting, allowed in values.items())


def table() -> str:
    """Return the table: a column per engine."""
    rows = [["", *(f"`{name}`" for name in ENGINES)], ["---"] * (len(ENGINES) + 1)]
    rows += [[title, *map(cell, ENGINES.values())] for title, cell in ROWS.items()]
    limited = {setting for facts in ENGINES.values() for setting in facts.serves}
    for setting in sorted(limited - {"device"}):
        rows.append([f"`{setting}`", *(_limits(facts, setting) for facts in ENGINES.values())])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    made = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif made != PAGE.read_text():
        print(f"{PAGE.name} is not what docs/make_engines.py would write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
