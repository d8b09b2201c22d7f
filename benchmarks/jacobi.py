"""Lookahead (Jacobi) decoding (arXiv 2402.02057) beside plain decoding and look-ups, in one process.

    python -m benchmarks.jacobi --target build/models/smollm2

The target improves a window of guesses of its own next tokens in every forward, and keeps the n-grams that
come up in it; those that begin with the newest token are verified in the same forward. Window and n-grams are
one tree. With the shared noise of coupled verification each node's token is the one that the target would
draw at its position, so the text is that of plain decoding at every temperature; the program checks this.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.prompts import load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray.demo_pair import resolve_model
from orchestrator.drafting.suffix_index import SuffixIndex
from orchestrator.text.tokenizer import Tokenizer
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise

WINDOWS = ((5, 3, 5), (8, 4, 8), (15, 5, 15))
"""Columns of the window, tokens of an n-gram, n-grams that are verified; the last is the paper's for 7B."""

MATCHED = 8
"""Most tokens of a look-up."""

POOLED = 64
"""N-grams that are kept for each first token."""


@dataclass
class Decoding:
    """What one way of decoding took.

    Attributes:
        token_ids: The tokens after the prompt.
        forwards: Forwards after that of the prompt.
        rows: Their rows.
        seconds: Their time, without that of sampling and of the window.
    """

    token_ids: list[int] = field(default_factory=list)
    forwards: int = 0
    rows: int = 0
    seconds: float = 0.0


class Target:
    """The target with one session, whose draws are a function of the position.

    Args:
        engine: Its only user is this object.
        prompt: Of the session.
        temperature: Likewise.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], temperature: float) -> None:
        self._engine, self._temperature = engine, temperature
        self._noise = Noise(1, 0, engine.vocab_size)
        self.tokens, self.made = list(prompt), Decoding()
        engine.forget("text")
        engine.step([SequenceInput("text", 0, prompt[:-1], 0)])
        self._cached = len(prompt) - 1

    def forward(self, nodes: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return the draws after the newest token and after each node of the tree below it."""
        fed = self.tokens[self._cached :]
        feed = SequenceInput("text", self._cached, [*fed, *nodes], 1 + len(nodes), parents or None)
        start = time.perf_counter()
        (logits,) = self._engine.step([feed])
        self.made.seconds += time.perf_counter() - start
        self.made.forwards += 1
        self.made.rows += len(fed) + len(nodes)
        self._cached = len(self.tokens)
        depths: list[int] = []
        for parent in parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return self._draws(logits, [0, *depths])

    def emit(self, token_ids: Sequence[int], path: Sequence[int] = ()) -> None:
        """Append tokens to the text, all but the last of which were the tree's nodes `path`."""
        if path:
            self._engine.keep_path("text", len(self.tokens), path)
            self._cached += len(path)
        self.tokens += token_ids
        self.made.token_ids += token_ids

    def _draws(self, logits: Tensor, depths: Sequence[int]) -> list[int]:
        if self._temperature == 0:
            return [int(token) for token in logits.argmax(-1)]
        first = len(self.tokens)
        noise = self._noise.gumbel(first, 1 + max(depths))
        scores = logits.double() / self._temperature + noise[list(depths)]
        return [int(token) for token in scores.argmax(-1)]


def plain(target: Target, count: int) -> None:
    """Decode `count` tokens one by one."""
    for _ in range(count):
        target.emit(target.forward((), ()))


def looked_up(target: Target, count: int) -> None:
    """Decode with the look-ups of gammaray: up to four tokens per matched one."""
    index = SuffixIndex()
    index.extend(target.tokens)
    while len(target.made.token_ids) < count:
        match = index.look_up(index.context, MATCHED)
        proposal = list(match.token_ids) if match else []
        draws = target.forward(proposal, range(-1, len(proposal) - 1))
        emitted = draws[:1]
        while len(emitted) <= len(proposal) and proposal[len(emitted) - 1] == emitted[-1]:
            emitted.append(draws[len(emitted)])
        target.emit(emitted, range(len(emitted) - 1))
        index.extend(emitted)


def lookahead(target: Target, count: int, width: int, size: int, verified: int) -> None:
    """Decode with a window of `width` columns and `size` - 1 rows, and up to `verified` n-grams of `size`."""
    pool: defaultdict[int, OrderedDict[tuple[int, ...], None]] = defaultdict(OrderedDict)
    seen = target.tokens
    window = [[seen[(row + column) % len(seen)] for column in range(width)] for row in range(size - 1)]
    while len(target.made.token_ids) < count:
        candidates = list(reversed(pool[target.tokens[-1]]))[:verified]
        nodes = [*window[0]]
        parents = list(range(-1, width - 1))
        for row in range(1, size - 1):
            nodes += window[row]
            parents += range((row - 1) * width, row * width)
        for candidate in candidates:
            parents += [-1, *range(len(nodes), len(nodes) + len(candidate) - 1)]
            nodes += candidate
        draws = target.forward(nodes, parents)
        emitted, path = draws[:1], range(0)
        for number, candidate in enumerate(candidates):
            first = width * (size - 1) + number * (size - 1)
            kept = draws[:1]
            while len(kept) < size and candidate[len(kept) - 1] == kept[-1]:
                kept.append(draws[first + len(kept)])
            if len(kept) > len(emitted):
                emitted, path = kept, range(first, first + len(kept) - 1)
        newest = draws[1 + width * (size - 2) : 1 + width * (size - 1)]
        for column in range(width):
            grams = pool[window[0][column]]
            gram = (*(window[row][column] for row in range(1, size - 1)), newest[column])
            grams.pop(gram, None)
            grams[gram] = None
            if len(grams) > POOLED:
                grams.popitem(last=False)
        window = [*window[1:], newest]
        target.emit(emitted, path)
        for row in window:  # the text has moved on by as many tokens as were emitted
            del row[: len(emitted) - 1]
            row += row[-1:] * (width - len(row)) if row else [target.tokens[-1]] * width


def run(options: Any) -> dict[str, Any]:
    """Return the result, JSON-ready."""
    model = resolve_model(options.target, "target")
    tokenizer, engine = Tokenizer(model), load_engine(model)
    ways: dict[str, Any] = {"plain": plain, "look-ups": looked_up}
    for width, size, verified in WINDOWS:
        name = f"window {width}, n-grams of {size}"
        ways[name] = lambda target, count, sizes=(width, size, verified): lookahead(target, count, *sizes)
    points = []
    for temperature in options.temperatures:
        made = {name: Decoding() for name in ways}
        is_equal = dict.fromkeys(ways, True)
        for task in load_tasks(options.categories.split(","), options.prompts):
            prompt = tokenizer.encode(tokenizer.render_chat(task.messages))
            expected: list[int] = []
            for name, way in ways.items():
                target = Target(engine, prompt, temperature)
                way(target, options.tokens)
                one, total = target.made, made[name]
                expected = expected or one.token_ids
                is_equal[name] &= one.token_ids[: options.tokens] == expected
                total.token_ids += one.token_ids
                total.forwards += one.forwards
                total.rows += one.rows
                total.seconds += one.seconds
        base = made["plain"]
        for name, total in made.items():
            per_token = total.seconds / len(total.token_ids)
            point = {
                "way": name,
                "temperature": temperature,
                "tokens_per_forward": round(len(total.token_ids) / total.forwards, 3),
                "rows_per_forward": round(total.rows / total.forwards, 1),
                "forward_cost": round(total.seconds / total.forwards * base.forwards / base.seconds, 3),
                "speed": round(base.seconds / len(base.token_ids) / per_token, 3),
                "is_equal": is_equal[name],
            }
            print(point, flush=True)
            points.append(point)
    return {"settings": settings_of(options), "windows": WINDOWS, "points": points}


def show(result: dict[str, Any]) -> None:
    """Print a row for each way and temperature."""
    columns = (
        "way",
        "temperature",
        "tokens_per_forward",
        "rows_per_forward",
        "forward_cost",
        "speed",
        "is_equal",
    )
    table = Table(*columns)
    for point in result["points"]:
        table.add_row(*(str(point[column]) for column in columns))
    Console(width=140).print(table)


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", required=True, help="directory or hub name")
    parser.add_argument("--categories", default="chat,code")
    parser.add_argument("--prompts", type=int, default=3, help="of each category")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    result = run(options)
    show(result)
    print(f"written: {write_result('jacobi', result, options.out)}")
    sys.exit(not all(point["is_equal"] for point in result["points"]))


if __name__ == "__main__":
    main()
