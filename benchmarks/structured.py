"""Completions that follow a JSON schema of 20 fields: speed with forced tokens, validity, equal tokens.

    make smollm2
    python -m benchmarks.structured --target build/models/smollm2

A cluster without a draft model serves the target (with one, if `--draft` names it). Every prompt is completed
in every way before the next one, in a random order: as free text by plain decoding, and by the schema with
gamma 0, with the forced tokens alone, and with all drafters. Speeds are tokens per second after the first
cycle. Exits with 1 if a completion is no valid document, or its tokens differ from those of gamma 0.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.cluster import run_or_exit, running_cluster
from benchmarks.provenance import write_result
from gammaray import AsyncClient
from gammaray.bench.tables import plain_table
from gammaray.client.completion import Completion
from gammaray.grammar.texts import json_schema_grammar

_WORDS = {"type": "string", "maxLength": 60}
SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "title": _WORDS,
        "author": _WORDS,
        "publisher": _WORDS,
        "language": {"enum": ["English", "French", "German", "Spanish", "other"]},
        "year": {"type": "integer", "minimum": 1500, "maximum": 2030},
        "pages": {"type": "integer", "minimum": 1, "maximum": 5000},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "is_fiction": {"type": "boolean"},
        "is_available": {"type": "boolean"},
        "genre": _WORDS,
        "keywords": {
            "type": "array",
            "items": {"type": "string", "maxLength": 20},
            "minItems": 2,
            "maxItems": 4,
        },
        "summary": {"type": "string", "maxLength": 160},
        "main_character": _WORDS,
        "place": _WORDS,
        "rating": {"type": "integer", "minimum": 1, "maximum": 5},
        "published_on": {"type": "string", "format": "date"},
        "isbn": {"type": "string", "pattern": "^97[89]-[0-9]{10}$"},
        "translator": {"anyOf": [_WORDS, {"type": "null"}]},
        "recommended_age": {"type": "integer", "minimum": 0, "maximum": 18},
    },
    "additionalProperties": False,
}
SCHEMA = {**SCHEMA, "required": list(SCHEMA["properties"])}

TOPICS = (
    "a novel about a lighthouse keeper",
    "a cookbook of soups",
    "a history of bicycles",
    "a detective story in Lisbon",
    "a children's book about an owl",
    "a guide to growing tomatoes",
    "a biography of a violinist",
    "science fiction about a mine on the moon",
    "a collection of poems about rivers",
    "a travel report from Iceland",
)

MAX_TOKENS = 512


@dataclass
class Sums:
    """Completions of one way at one temperature."""

    speeds: list[float] = field(default_factory=list)
    tokens_per_cycle: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    tokens: int = 0
    forced_cycles: int = 0
    cycles: int = 0
    valid: int = 0
    equal: int = 0

    def row(self) -> dict[str, Any]:
        """Return the figures, JSON-ready."""
        return {
            "completions": len(self.speeds),
            "tokens": self.tokens,
            "tokens_per_s": statistics.median(self.speeds),
            "over_gamma_0": statistics.median(self.ratios),
            "over_gamma_0_range": [min(self.ratios), max(self.ratios)],
            "tokens_per_cycle": statistics.fmean(self.tokens_per_cycle),
            "forced_cycles": self.forced_cycles,
            "cycles": self.cycles,
            "valid": self.valid,
            "equal": self.equal,
        }


def ways() -> dict[str, dict[str, Any]]:
    """Return the options of each way to complete a prompt."""
    grammar = json_schema_grammar(SCHEMA)
    return {
        "free text, gamma 0": {"gamma": 0, "ignore_eos": True, "max_tokens": 200},
        "schema, gamma 0": {"gamma": 0, "grammar": grammar},
        "schema, forced tokens": {"drafter": "grammar", "grammar": grammar},
        "schema, default": {"grammar": grammar},
    }


def is_valid(text: str) -> bool:
    """Return whether a text is a document of the schema."""
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def measure(
    client: AsyncClient,
    prompts: list[list[int]],
    temperatures: list[float],
    repetitions: int,
    label: str,
) -> dict[tuple[float, str], Sums]:
    """Complete every prompt in every way; past outputs of another label are not proposed."""
    sums: dict[tuple[float, str], Sums] = {}
    order = random.Random(0)
    for repetition in range(repetitions):
        for number, prompt in enumerate(prompts):
            for temperature in temperatures:
                asked = list(ways().items())
                order.shuffle(asked)
                made: dict[str, Completion] = {}
                for name, options in asked:
                    salt = f"{label} {name} {repetition}"
                    given = {"max_tokens": MAX_TOKENS, "cache_salt": salt, **options}
                    made[name] = await client.complete(prompt, temperature=temperature, seed=number, **given)
                plain = made["schema, gamma 0"]
                for name, completion in made.items():
                    one = sums.setdefault((temperature, name), Sums())
                    _add(one, completion, plain)
    return sums


def _add(one: Sums, completion: Completion, plain: Completion) -> None:
    summary = completion.summary
    speed, plain_speed = _speed(completion), _speed(plain)
    one.speeds.append(speed)
    one.ratios.append(speed / plain_speed)
    one.tokens += len(completion.tokens)
    one.tokens_per_cycle.append(len(completion.tokens) / summary.cycles)
    one.forced_cycles += summary.grammar_cycles
    one.cycles += summary.cycles
    one.valid += is_valid(completion.text)
    one.equal += _ids(completion) == _ids(plain)


def _ids(completion: Completion) -> list[int]:
    return [token.token_id for token in completion.tokens]


def _speed(completion: Completion) -> float:
    """Return tokens per second of the whole completion, with its prefill."""
    return len(completion.tokens) / completion.summary.total_ms * 1000


async def run(given: argparse.Namespace) -> dict[tuple[float, str], Sums]:
    """Start a cluster, warm it up and measure."""
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    names = ", ".join(SCHEMA["properties"])
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": f"Invent {topic}. Answer with a JSON object with the fields {names}.",
                }
            ],
            add_generation_prompt=True,
            return_dict=False,
        )
        for topic in TOPICS[: given.prompts]
    ]
    options = ("--target", given.target, *(("--draft", given.draft) if given.draft else ()))
    temperatures = [float(temperature) for temperature in given.temperature.split(",")]
    async with running_cluster(*options) as cluster, AsyncClient(cluster.grpc_address) as client:
        await client.wait_ready(60, roles=("target", "draft") if given.draft else ("target",))
        await measure(client, prompts[:1], temperatures, 1, "warm-up")
        return await measure(client, prompts, temperatures, given.repetitions, "measured")


def main() -> None:
    """Measure, print a table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--target", default="build/models/smollm2", help="directory or hub name of a chat model"
    )
    parser.add_argument("--draft", help="directory of a draft model; default: none")
    parser.add_argument("--prompts", type=int, default=5, help=f"up to {len(TOPICS)}; default 5")
    parser.add_argument("--repetitions", type=int, default=2, help="default 2")
    parser.add_argument("--temperature", default="0,1", help="comma-separated; default 0,1")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    given = parser.parse_args()
    sums = run_or_exit(run(given))
    console = Console()
    table = plain_table(
        "JSON of 20 fields", ("T", "way", "tokens/s", "x gamma 0", "range", "tokens/cycle", "valid", "equal")
    )
    for (temperature, name), one in sorted(sums.items(), key=lambda item: item[0][0]):
        row, is_free = one.row(), name.startswith("free")
        table.add_row(
            *(f"{temperature:g}", name, f"{row['tokens_per_s']:.1f}", f"{row['over_gamma_0']:.2f}"),
            "{:.2f}-{:.2f}".format(*row["over_gamma_0_range"]),
            f"{row['tokens_per_cycle']:.2f}",
            "" if is_free else f"{row['valid']} of {row['completions']}",
            "" if is_free else f"{row['equal']} of {row['completions']}",
        )
    console.print(table)
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    rows = [{"temperature": key[0], "way": key[1], **one.row()} for key, one in sums.items()]
    console.print(f"written: {write_result('structured', {'settings': settings, 'rows': rows}, given.out)}")
    ruled = [one.row() for (_, name), one in sums.items() if not name.startswith("free")]
    if any(row["valid"] < row["completions"] or row["equal"] < row["completions"] for row in ruled):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
