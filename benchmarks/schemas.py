"""Random JSON schemas: each completion is a valid document, with the tokens of gamma 0 however it is drafted.

    python -m benchmarks.schemas --schemas 1000

A cluster with the demo pair completes a prompt by each schema at temperature 0 and 1: with gamma 0, and then
with each way to draft. Texts, numbers and arrays are bounded, so that most documents end within the tokens;
one that is cut is compared, but no document. Exits with 1 if one is invalid, or a token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jsonschema
from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray import AsyncClient, FinishReason
from gammaray.bench.tables import plain_table
from gammaray.client.completion import Completion
from gammaray.grammar.texts import json_schema_grammar
from gammaray.types import GammaPolicy

WAYS: Mapping[str, dict[str, Any]] = {
    "default": {},
    "draft model, chains of 4": {"gamma": 4},
    "draft model, trees": {"gamma": GammaPolicy(fixed=4, max_nodes=16)},
    "suffix decoding": {"drafter": "suffix"},
    "forced tokens": {"drafter": "grammar"},
}

MAX_TOKENS = 400
MAX_DEPTH = 3
_WORDS = ("name", "id", "size", "items", "value", "kind", "note", "owner", "Überschrift", "a b", "x")
_PATTERNS = ("^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{4}$", "^(yes|no|maybe)$", "^v[0-9]+\\.[0-9]{1,3}$")
_FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
_CONSTANTS = ('a "quoted" text', "line\nbreak", 3, False, ["a", 1], {"k": None})


def random_schema(draw: random.Random) -> dict[str, Any]:
    """Return a schema of an object, sometimes with a definition that it refers to; llguidance supports it."""
    made = _object(draw, 0)
    if draw.random() < 0.3:
        made["$defs"] = {"part": _any(draw, 1)}
        made["properties"]["part"] = {"$ref": "#/$defs/part"}
        if draw.random() < 0.5:
            made["required"].append("part")
    return made


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_WORDS, draw.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: _any(draw, depth + 1) for name in names},
        "additionalProperties": False,
        "required": [name for name in names if draw.random() < 0.7],
    }


def _any(draw: random.Random, depth: int) -> dict[str, Any]:
    low, least = draw.randint(-1000, 1000), draw.randint(0, 2)
    leaves: list[dict[str, Any]] = [
        {"type": "string", "pattern": draw.choice(_PATTERNS)},
        {"type": "string", "format": draw.choice(_FORMATS)},
        {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 16)},
        {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 10_000)},
        {"type": "number", "minimum": 0, "maximum": draw.randint(1, 99)},
        {"enum": draw.sample([*draw.sample(_WORDS, 3), 17, None, True], draw.randint(1, 5))},
        {"const": draw.choice(_CONSTANTS)},
        {"type": draw.choice(("boolean", "null"))},
    ]
    kind = draw.randrange(len(leaves) + (3 if depth < MAX_DEPTH else 0)) - len(leaves)
    if kind == 0:
        return _object(draw, depth)
    if kind == 1:
        most = least + draw.randint(0, 2)
        return {"type": "array", "items": _any(draw, depth + 1), "minItems": least, "maxItems": most}
    if kind == 2:
        return {"anyOf": [_any(draw, depth + 1) for _ in range(draw.randint(2, 3))]}
    return leaves[kind]


def is_valid(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a text is a document of a schema."""
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def ids_of(completion: Completion) -> list[int]:
    """Return the tokens of a completion."""
    return [token.token_id for token in completion.tokens]


async def check(
    client: AsyncClient, number: int, schema: Mapping[str, Any], temperature: float, found: Counter[str]
) -> list[dict[str, Any]]:
    """Complete by one schema in every way, count the outcomes, and return the failures."""
    grammar = json_schema_grammar(schema)
    names = ", ".join(schema["properties"])
    asked: dict[str, Any] = {
        "prompt": f"# A JSON object with {names}\nexample = ",
        "grammar": grammar,
        "max_tokens": MAX_TOKENS,
        "temperature": temperature,
        "seed": number,
        "cache_salt": str(number % 7),
    }
    plain = await client.complete(**asked, gamma=0)
    failures = []
    for way, options in {"gamma 0": {}, **WAYS}.items():
        made = plain if way == "gamma 0" else await client.complete(**asked, **options)
        found[f"{way}, completions"] += 1
        found[f"{way}, tokens"] += len(made.tokens)
        found[f"{way}, cycles"] += made.summary.cycles
        is_equal = ids_of(made) == ids_of(plain)
        found[f"{way}, equal"] += is_equal
        ended = made.finish_reason is FinishReason.STOP
        found[f"{way}, ended"] += ended
        is_good = ended and is_valid(made.text, schema)
        found[f"{way}, valid"] += is_good
        if not is_equal or (ended and not is_good):
            failures.append({"schema": schema, "way": way, "temperature": temperature, "text": made.text})
    return failures


async def run(given: argparse.Namespace, console: Console) -> tuple[dict[float, Counter[str]], list[Any]]:
    """Start a cluster and check all schemas, several at a time."""
    draw, temperatures = random.Random(given.seed), [float(part) for part in given.temperature.split(",")]
    schemas = [random_schema(draw) for _ in range(given.schemas)]
    found = {temperature: Counter[str]() for temperature in temperatures}
    failures: list[Any] = []
    places = asyncio.Semaphore(given.streams)

    async def one(client: AsyncClient, number: int, temperature: float) -> None:
        async with places:
            failures.extend(await check(client, number, schemas[number], temperature, found[temperature]))

    async with connected() as client:
        began = time.monotonic()
        for start in range(0, len(schemas), 50):
            numbers = range(start, min(start + 50, len(schemas)))
            await asyncio.gather(*(one(client, number, t) for number in numbers for t in temperatures))
            console.print(f"{numbers.stop} schemas, {time.monotonic() - began:.0f} s", style="dim")
    return found, failures


def main() -> None:
    """Check, print a table and write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("--schemas", type=int, default=1000, help="default 1000")
    parser.add_argument("--temperature", default="0,1", help="comma-separated; default 0,1")
    parser.add_argument("--streams", type=int, default=4, help="schemas at a time; default 4")
    parser.add_argument("--seed", type=int, default=0, help="of the schemas; default 0")
    given, console = parser.parse_args(), Console()
    found, failures = run_or_exit(run(given, console))
    table = plain_table(
        "Random JSON schemas", ("T", "way", "tokens/cycle", "ended", "valid of ended", "equal to gamma 0")
    )
    for temperature, counts in found.items():
        for way in ("gamma 0", *WAYS):
            count = {key: counts[f"{way}, {key}"] for key in ("completions", "ended", "valid", "equal")}
            per_cycle = counts[f"{way}, tokens"] / counts[f"{way}, cycles"]
            table.add_row(
                *(f"{temperature:g}", way, f"{per_cycle:.2f}", f"{count['ended']} of {count['completions']}"),
                *(f"{count['valid']} of {count['ended']}", f"{count['equal']} of {count['completions']}"),
            )
    console.print(table)
    for failure in failures[:10]:
        console.print(failure, style="red")
    counts_by = {f"{temperature:g}": dict(counts) for temperature, counts in found.items()}
    result = {"settings": settings_of(given), "counts": counts_by, "failures": failures}
    console.print(f"written: {write_result('schemas', result, given.out)}")
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
