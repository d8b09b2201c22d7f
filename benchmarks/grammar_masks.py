"""What the mask of a grammar costs per node: computed beside the forward, and applied to the logits.

    make smollm2
    python -m benchmarks.grammar_masks --target build/models/smollm2

Each session is somewhere in a document of its grammar, and a step computes the masks of a chain of the next
four tokens of every session, as a target does. Wall time of one thread, over all steps through the documents.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping

import torch
from rich.console import Console
from transformers import AutoConfig, AutoTokenizer

from benchmarks.structured import SCHEMA
from gammaray.bench.tables import plain_table
from gammaray.grammar.matcher import GrammarCompiler
from gammaray.grammar.texts import JSON_OBJECT, json_schema_grammar, regex_grammar
from gammaray.types import SamplingParams
from services.engine.sampling.edits import LogitEdits

NUM_DRAFTED = 4
DOCUMENT = {
    "title": "The Keeper of the Light",
    "author": "Maria Fernanda Costa",
    "publisher": "Harbour & Sons",
    "language": "English",
    "year": 1987,
    "pages": 312,
    "price": 18.5,
    "currency": "EUR",
    "is_fiction": True,
    "is_available": False,
    "genre": "literary fiction",
    "keywords": ["lighthouse", "solitude", "storm"],
    "summary": "A man who has kept a lighthouse for forty years writes letters to a ship that never answers.",
    "main_character": "Jonas Weaver",
    "place": "an island off the coast of Maine",
    "rating": 4,
    "published_on": "1987-10-02",
    "isbn": "978-0123456789",
    "translator": None,
    "recommended_age": 14,
}
CASES: Mapping[str, tuple[str, str]] = {
    "schema of 20 fields": (json_schema_grammar(SCHEMA), json.dumps(DOCUMENT)),
    "any JSON object": (json_schema_grammar(JSON_OBJECT), json.dumps(DOCUMENT)),
    "expression": (
        regex_grammar(r"([A-Z][a-z]+ ?)+: [0-9]{1,9}(\.[0-9]+)? (EUR|USD)(; .{1,80})*"),
        "The Total Of All Invoices: 18312.50 EUR; paid in three parts; the last one in October; no discount",
    ),
}


def measure(
    compiler: GrammarCompiler, grammar: str, tokens: list[int], vocab_size: int, eos: list[int], sessions: int
) -> tuple[list[float], list[float]]:
    """Return the milliseconds per node of each step, for computing and for applying."""
    params = SamplingParams(grammar=grammar)
    logits = torch.randn(NUM_DRAFTED + 1, vocab_size)
    edits = [LogitEdits(params, eos, 1, vocab_size, grammar=compiler.begin(grammar)) for _ in range(sessions)]
    computing, applying = [], []
    for step in range(len(tokens) - NUM_DRAFTED):
        all_paths = []
        for number, one in enumerate(edits):
            at = (step + number * len(tokens) // sessions) % (len(tokens) - NUM_DRAFTED)
            one.follow([0, *tokens[:at]])
            all_paths.append([tuple(tokens[at : at + size]) for size in range(NUM_DRAFTED + 1)])
        began = time.perf_counter()
        for one, paths in zip(edits, all_paths, strict=True):
            one.prepare(paths)
        computed = time.perf_counter()
        for one, paths in zip(edits, all_paths, strict=True):
            one.apply(logits, paths)
        applied = time.perf_counter()
        nodes = sessions * (NUM_DRAFTED + 1)
        computing.append(1000 * (computed - began) / nodes)
        applying.append(1000 * (applied - computed) / nodes)
    return computing, applying


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default="build/models/smollm2", help="directory or hub name of a model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    vocab_size, eos = AutoConfig.from_pretrained(given.target).vocab_size, [tokenizer.eos_token_id]
    compiler = GrammarCompiler(tokenizer.backend_tokenizer.to_str(), vocab_size, eos)
    columns = ("grammar", "check, ms", "sessions", "nodes", "mask p50, ms", "p99", "apply p50, ms", "p99")
    table = plain_table(f"Per node, vocabulary of {vocab_size:,}", columns)
    for name, (grammar, text) in CASES.items():
        began = time.perf_counter()
        compiler.check(grammar)
        compiler.begin(grammar)
        checked_ms = 1000 * (time.perf_counter() - began)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for sessions in (1, 8, 64):
            times = measure(compiler, grammar, tokens, vocab_size, eos, sessions)
            figures = [
                f"{figure:.3f}"
                for one in times
                for figure in (statistics.median(one), sorted(one)[math.ceil(0.99 * len(one)) - 1])
            ]
            nodes = str(sessions * (NUM_DRAFTED + 1))
            table.add_row(name, f"{checked_ms:.1f}", str(sessions), nodes, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
