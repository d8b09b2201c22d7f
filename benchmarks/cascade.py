"""Staged drafting: look-ups propose to the draft model, which verifies several of its tokens in one forward.

    python -m benchmarks.cascade --target TARGET --draft DRAFT  # such as those of `make qwen`

Target and draft take turns in one process, with the shared noise of coupled verification on both storeys. A
chain of the draft is the same with and without look-ups, and so is the text; the program checks both. What
look-ups take off is a share of the drafting: `draft_ms` per token of the text beside `target_ms`. Where the
draft works while the target computes, less of it is left to take off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.jacobi import MATCHED, Decoding, Target, looked_up, plain
from benchmarks.prompts import load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray.demo_pair import resolve_model
from orchestrator.drafting.suffix_index import Context, SuffixIndex
from orchestrator.text.tokenizer import Tokenizer
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise

COLUMNS = (
    *("temperature", "way", "gamma", "tokens_per_cycle", "drafted_per_forward"),
    *("draft_ms", "target_ms", "speed", "is_equal"),
)


@dataclass
class Drafting:
    """What a draft model did for one text.

    Attributes:
        chains: Its proposals.
        forwards: How many it took.
        seconds: Their time.
    """

    chains: list[tuple[int, ...]] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0


class Drafter:
    """A draft model with one session.

    Args:
        engine: Its only user is this object.
        prompt: Of the session.
        temperature: Likewise.
        is_helped: Whether look-ups propose to it.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], temperature: float, *, is_helped: bool) -> None:
        self._engine, self._temperature, self._is_helped = engine, temperature, is_helped
        self._noise, self._index, self.made = Noise(1, 0, engine.vocab_size), SuffixIndex(), Drafting()
        engine.forget("text")
        engine.step([SequenceInput("text", 0, prompt[:-1], 0)])
        self._cached = list(prompt[:-1])

    def draft(self, text: Sequence[int], count: int) -> list[int]:
        """Return the next `count` tokens after a text that continues the last one."""
        self._index.extend(text[self._index.end :])
        same = next((at for at, (a, b) in enumerate(zip(self._cached, text, strict=False)) if a != b), None)
        num_cached = min(len(self._cached), len(text) - 1) if same is None else same
        tokens = list(text)
        while len(tokens) < len(text) + count:
            hints = self._look_up(tokens, count - (len(tokens) - len(text)) - 1)
            self._engine.truncate("text", num_cached)
            feed = [*tokens[num_cached:], *hints]
            draws = self._forward(SequenceInput("text", num_cached, feed, 1 + len(hints)), len(tokens))
            num_cached, kept = len(tokens), draws[:1]
            while len(kept) <= len(hints) and hints[len(kept) - 1] == kept[-1]:
                kept.append(draws[len(kept)])
            num_cached += len(kept) - 1
            tokens += kept
        self._cached = tokens[:num_cached]
        self.made.chains.append(tuple(tokens[len(text) :]))
        return tokens[len(text) :]

    def _look_up(self, tokens: Sequence[int], depth: int) -> list[int]:
        if not self._is_helped or depth < 1:
            return []
        match = self._index.look_up(Context.of(tokens), min(depth, MATCHED))
        return list(match.token_ids) if match else []

    def _forward(self, feed: SequenceInput, position: int) -> list[int]:
        start = time.perf_counter()
        (logits,) = self._engine.step([feed])
        self.made.seconds += time.perf_counter() - start
        self.made.forwards += 1
        if self._temperature == 0:
            return [int(token) for token in logits.argmax(-1)]
        scores = logits.double() / self._temperature + self._noise.gumbel(position, len(logits))
        return [int(token) for token in scores.argmax(-1)]


def drafted(target: Target, drafter: Drafter, count: int, gamma: int) -> None:
    """Decode with chains of `gamma` tokens."""
    while len(target.made.token_ids) < count:
        proposal = drafter.draft(target.tokens, gamma)
        draws = target.forward(proposal, range(-1, gamma - 1))
        emitted = draws[:1]
        while len(emitted) <= gamma and proposal[len(emitted) - 1] == emitted[-1]:
            emitted.append(draws[len(emitted)])
        target.emit(emitted, range(len(emitted) - 1))


@dataclass
class Total:
    """Sums over the texts of one way of decoding."""

    decoding: Decoding = field(default_factory=Decoding)
    drafting: Drafting = field(default_factory=Drafting)
    is_equal: bool = True

    def add(self, one: Decoding, drafting: Drafting) -> None:
        """Add a text."""
        self.decoding.token_ids += one.token_ids
        self.decoding.forwards += one.forwards
        self.decoding.seconds += one.seconds
        self.drafting.chains += drafting.chains
        self.drafting.forwards += drafting.forwards
        self.drafting.seconds += drafting.seconds

    def point(self, way: str, gamma: int, temperature: float, plain_s: float) -> dict[str, Any]:
        """Return a row of the result; `plain_s` are the seconds of a token of plain decoding."""
        made, drafting = self.decoding, self.drafting
        num_tokens = len(made.token_ids)
        return {
            "temperature": temperature,
            "way": way,
            "gamma": gamma,
            "tokens_per_cycle": round(num_tokens / made.forwards, 3),
            "drafted_per_forward": round(sum(map(len, drafting.chains)) / max(1, drafting.forwards), 3),
            "draft_ms": round(1000 * drafting.seconds / num_tokens, 1),
            "target_ms": round(1000 * made.seconds / num_tokens, 1),
            "speed": round(plain_s * num_tokens / (made.seconds + drafting.seconds), 3),
            "is_equal": self.is_equal,
        }


def run(options: Any) -> dict[str, Any]:
    """Return the result, JSON-ready."""
    model = resolve_model(options.target, "target")
    tokenizer, engine = Tokenizer(model), load_engine(model)
    draft = load_engine(resolve_model(options.draft, "draft"), draft_for=model, weights=options.draft_weights)
    points = []
    for temperature in options.temperatures:
        totals: dict[tuple[str, int], Total] = {}
        for task in load_tasks(options.categories.split(","), options.prompts):
            prompt = tokenizer.encode(tokenizer.render_chat(task.messages))
            target = Target(engine, prompt, temperature)
            plain(target, options.tokens)
            expected = target.made.token_ids
            totals.setdefault(("plain", 0), Total()).add(target.made, Drafting())
            target = Target(engine, prompt, temperature)
            looked_up(target, options.tokens)
            totals.setdefault(("look-ups", MATCHED), Total()).add(target.made, Drafting())
            for gamma in options.gammas:
                chains = []
                for way in ("draft", "draft with look-ups"):
                    drafter = Drafter(draft, prompt, temperature, is_helped=way != "draft")
                    target = Target(engine, prompt, temperature)
                    drafted(target, drafter, options.tokens, gamma)
                    total = totals.setdefault((way, gamma), Total())
                    total.add(target.made, drafter.made)
                    chains.append(drafter.made.chains)
                    total.is_equal &= target.made.token_ids[: options.tokens] == expected
                    total.is_equal &= chains[0] == chains[-1]
        base = totals["plain", 0].decoding
        plain_s = base.seconds / len(base.token_ids)
        for (way, gamma), total in totals.items():
            points.append(total.point(way, gamma, temperature, plain_s))
            print(points[-1], flush=True)
    return {"settings": settings_of(options), "points": points}


def show(result: dict[str, Any]) -> None:
    """Print a row for each way and temperature."""
    table = Table(*COLUMNS)
    for point in result["points"]:
        table.add_row(*(str(point[column]) for column in COLUMNS))
    Console(width=140).print(table)


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", required=True, help="directory or hub name")
    parser.add_argument("--draft", required=True, help="likewise")
    parser.add_argument("--draft-weights", default="int8", choices=("auto", "int8"))
    parser.add_argument("--categories", default="chat,code")
    parser.add_argument("--prompts", type=int, default=3, help="of each category")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--gammas", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    options = parser.parse_args()
    result = run(options)
    show(result)
    print(f"written: {write_result('cascade', result, options.out)}")
    sys.exit(not all(point["is_equal"] for point in result["points"]))


if __name__ == "__main__":
    main()
