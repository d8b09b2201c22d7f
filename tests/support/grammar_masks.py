"""Compares the masks of two versions of llguidance, each in an environment of its own.

    python -m tests.support.grammar_masks write new.json
    .venv-vllm/bin/python -m tests.support.grammar_masks write old.json
    python -m tests.support.grammar_masks compare new.json old.json

The grammars are those of `grammar_identity`, the random schemas of the tests, and those of a file with a JSON
list of them. Each is followed along random texts of a vocabulary of bytes, which are a function of the masks.
Exits with 1 if masks differ.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.identity import GRAMMARS, byte_compiler, walk
from gammaray.grammar.texts import json_schema_grammar, without_unicode_escapes
from tests.support.schema_helpers import HARD_SCHEMAS, SCHEMAS

NUM_WALKS, NUM_STEPS = 3, 48


@click.group(help=__doc__)
def main() -> None:
    """Run a command."""


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--examples", default=300, show_default=True, help="Random schemas of each kind.")
@click.option("--grammars", type=click.Path(path_type=Path), help="File of further grammars, a JSON list.")
@click.option("--escapes", is_flag=True, help="Printable characters may be escaped, which 1.7 does not know.")
def write(out: Path, examples: int, grammars: Path | None, escapes: bool) -> None:
    """Write the masks of this environment."""
    further = json.loads(grammars.read_text()) if grammars is not None else []
    compiler = byte_compiler()
    masks: dict[str, Any] = {}
    for grammar in (*GRAMMARS, *random_grammars(examples), *further):
        grammar = grammar if escapes else without_unicode_escapes(grammar)
        try:
            compiler.check(grammar)
        except InvalidArgumentError as error:
            masks[grammar] = error.got
            continue
        masks[grammar] = [
            [(token_id, mask.hex()) for token_id, mask in walk(compiler, grammar, seed, NUM_STEPS)]
            for seed in range(NUM_WALKS)
        ]
    out.write_text(json.dumps({"version": version("llguidance"), "masks": masks}))
    click.echo(f"{len(masks)} grammars by llguidance {version('llguidance')}")


@main.command()
@click.argument("first", type=click.Path(exists=True, path_type=Path))
@click.argument("second", type=click.Path(exists=True, path_type=Path))
def compare(first: Path, second: Path) -> None:
    """Compare two files of masks."""
    one, two = json.loads(first.read_text()), json.loads(second.read_text())
    counts: Counter[str] = Counter()
    for grammar in one["masks"].keys() | two["masks"].keys():
        how, what = difference(one["masks"].get(grammar), two["masks"].get(grammar))
        counts[how] += 1
        if what:
            click.echo(f"{how}: {grammar[:300]!r}\n    {what}")
    click.echo(f"llguidance {one['version']} and {two['version']}: {dict(sorted(counts.items()))}")
    raise SystemExit(counts.total() != counts["equal"] + counts["refused by both"])


def random_grammars(examples: int) -> Iterator[str]:
    """Yield the grammars of random schemas, the same in each environment."""
    for strategy in (SCHEMAS, HARD_SCHEMAS):
        for schema in _drawn(strategy, examples):
            try:
                yield json_schema_grammar(schema)
            except InvalidArgumentError:
                continue  # by gammaray itself


def _drawn(strategy: SearchStrategy[Any], examples: int) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(schema: Any) -> None:
        found.append(schema)

    collect()
    return found


def difference(one: Any, two: Any) -> tuple[str, str]:
    """Return the kind of difference between what two versions do with a grammar, and the first place."""
    if one is None or two is None:
        return "in one file only", "-"
    if isinstance(one, str) and isinstance(two, str):
        return "refused by both", ""
    if isinstance(one, str) or isinstance(two, str):
        return "refused by one", f"the first: {_short(one)}, the second: {_short(two)}"
    for number, (mine, theirs) in enumerate(zip(one, two, strict=True)):
        if mine != theirs:
            return "masks differ", f"walk {number}: {_first(mine, theirs)}"
    return "equal", ""


def _short(found: Any) -> str:
    return found if isinstance(found, str) else "masks"


def _first(mine: list[Any], theirs: list[Any]) -> str:
    equal = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if equal is None:
        return f"{len(mine)} and {len(theirs)} steps"
    masks = [int.from_bytes(bytes.fromhex(walked[equal][1]), "little") for walked in (mine, theirs)]
    only = [sorted(_ids(masks[at] & ~masks[1 - at])) for at in (0, 1)]
    return f"after tokens {[token for token, _ in mine[1 : equal + 1]]}: only {only[0]}, only {only[1]}"


def _ids(bits: int) -> Iterable[int]:
    return (at for at in range(bits.bit_length()) if bits >> at & 1)


if __name__ == "__main__":
    main()
