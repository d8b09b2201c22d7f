"""How often `gammaray audit`'s tests of chance err, and how many tokens they need for planted faults.

    python -m benchmarks.audit_simulation

A target writes texts at temperature 1; of each position its 20 most likely tokens are recorded, the draft's
most likely token, and what each planted fault makes of the probabilities, from the whole distribution. An
audit draws a token at each of these positions in turn, from a random one on, and bets as `LawTest` and
`IndependenceTest` do: the factors are theirs, computed once for each position and cell. Each of the two has
its share of the probability of a false alarm; a false alarm of an audit is one of either test.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import workloads
from benchmarks.prompts import load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray.audit.chance import ALPHA
from gammaray.audit.law import (
    ALTERNATIVES,
    LOG_STAKES,
    Bets,
    LawTest,
    Position,
    pair_log_factors,
)
from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from orchestrator.text.tokenizer import Tokenizer
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine

LISTED = 20
CHUNK = 4000
_WIDTH = LISTED + 1
_PAIR_ALTERNATIVES = 9

Law = Callable[[Tensor], Tensor]
"""From log-probabilities [rows, vocab_size] to the probabilities that a server draws from."""


def _top_p(log_p: Tensor) -> Tensor:
    p, order = log_p.exp().sort(dim=-1, descending=True)
    kept = p * (p.cumsum(dim=-1) - p < 0.95)
    return torch.zeros_like(p).scatter(-1, order, kept / kept.sum(dim=-1, keepdim=True))


def _top_k(log_p: Tensor) -> Tensor:
    least = log_p.topk(50, dim=-1).values[:, -1:]
    return log_p.masked_fill(log_p < least, -math.inf).softmax(dim=-1)


def _tempered(temperature: float) -> Law:
    return lambda log_p: (log_p / temperature).softmax(dim=-1)


LAWS: Mapping[str, Law] = {
    "honest": torch.exp,
    **{f"temperature {value:g}": _tempered(value) for value in (0.9, 0.95, 1.05, 1.1)},
    "top_p 0.95": _top_p,
    "top_k 50": _top_k,
}
"""What the server draws from; it reports the first one."""


@dataclass(frozen=True)
class Fault:
    """What a server does wrong.

    Attributes:
        name: For the table.
        law: Name of the law that it draws from.
        share: Share of the tokens that are replaced.
        by: What replaces them: the most likely token of the "draft" or of the "target".
        family: Which of `LawTest.smallest_detectable` it is one of; "" for none.
        size: Its size in that family, relative to the honest server's.
        most: Tokens of an audit at most.
    """

    name: str
    law: str = "honest"
    share: float = 0.0
    by: str = "draft"
    family: str = ""
    size: float = 0.0
    most: int = 100_000


HONEST = Fault("nothing")
FAULTS = (
    Fault("temperature 0.9", "temperature 0.9", family="temperature below 1", size=1 / 0.9 - 1),
    Fault("temperature 0.95", "temperature 0.95", family="temperature below 1", size=1 / 0.95 - 1),
    Fault("temperature 1.05", "temperature 1.05", family="temperature above 1", size=1 - 1 / 1.05),
    Fault("temperature 1.1", "temperature 1.1", family="temperature above 1", size=1 - 1 / 1.1),
    Fault("5 % of tokens from the draft", share=0.05),
    Fault("2 % of tokens from the draft", share=0.02),
    Fault("1 % of tokens from the draft", share=0.01),
    Fault("5 % of tokens the top-1 token", share=0.05, by="target", family="top-1 share", size=0.05),
    Fault("2 % of tokens the top-1 token", share=0.02, by="target", family="top-1 share", size=0.02),
    Fault("top_p 0.95 left on", "top_p 0.95"),
    Fault("top_k 50 left on", "top_k 50"),
)


@dataclass
class Recorded:
    """Positions of texts.

    Attributes:
        listed: Log-probabilities of the most likely tokens.
        positions: Their cells.
        laws: By name of a law, probabilities of the cells, [positions, _WIDTH].
        favourites: By "draft" and "target", the cell of its most likely token, [positions].
    """

    listed: list[dict[int, float]]
    positions: list[Position]
    laws: dict[str, np.ndarray]
    favourites: dict[str, np.ndarray]


def record(
    target: str, draft: str, prompts: Sequence[str], num_tokens: int, reported: torch.dtype
) -> Recorded:
    """Let a target continue prompts at temperature 1, and record each position.

    Args:
        target: Directory, or "demo".
        draft: Directory, or "demo".
        prompts: One per text.
        num_tokens: Positions of each text.
        reported: To what the reported log-probabilities are rounded; draws are from the exact ones.
    """
    path = resolve_model(target, "target")
    tokenizer, generator = Tokenizer(path), torch.Generator().manual_seed(0)
    texts = [list(tokenizer.encode(prompt)) for prompt in prompts]
    starts = [len(text) for text in texts]
    engine, feeds = load_engine(path), [list(text) for text in texts]
    tops, laws = [], {name: [] for name in LAWS}
    for _ in range(num_tokens):
        inputs = [
            SequenceInput(str(number), len(text) - len(feed), feed, 1)
            for number, (text, feed) in enumerate(zip(texts, feeds, strict=True))
        ]
        log_p = torch.cat(engine.step(inputs)).double().log_softmax(dim=-1)
        top = log_p.topk(LISTED, dim=-1)
        tops.append(top)
        for name, law in LAWS.items():
            laws[name].append(law(log_p).gather(-1, top.indices))
        feeds = torch.multinomial(log_p.exp(), 1, generator=generator).tolist()
        for text, feed in zip(texts, feeds, strict=True):
            text += feed
    # Text by text, as the draft's positions come.
    ids, values = (
        torch.stack([getattr(top, name) for top in tops], 1).flatten(0, 1) for name in ("indices", "values")
    )
    probs = {name: torch.stack(found, 1).flatten(0, 1).numpy() for name, found in laws.items()}
    rows = zip(ids.tolist(), values.to(reported).tolist(), strict=True)
    listed = [dict(zip(*row, strict=True)) for row in rows]
    return in_cells(listed, probs, list(_favourites(resolve_model(draft, "draft"), path, texts, starts)))


def _favourites(draft: str, target: str, texts: Sequence[list[int]], starts: Sequence[int]) -> Iterator[int]:
    """Yield the draft's most likely token at each position of the texts."""
    engine = load_engine(draft, draft_for=target)
    for number, (text, start) in enumerate(zip(texts, starts, strict=True)):
        (logits,) = engine.step([SequenceInput(str(number), 0, text[:-1], len(text) - start)])
        engine.release(str(number))
        yield from logits.argmax(dim=-1).tolist()


def in_cells(
    listed: Sequence[dict[int, float]], probs: Mapping[str, np.ndarray], drafts: Sequence[int]
) -> Recorded:
    """Return positions by their cells.

    Args:
        listed: Log-probabilities of the most likely tokens, from the first on.
        probs: By name of a law, the probabilities of these tokens, [positions, LISTED].
        drafts: The draft's most likely tokens.
    """
    positions = [Position.read(found, LISTED) for found in listed]
    laws = {name: np.zeros((len(positions), _WIDTH)) for name in probs}
    for number, position in enumerate(positions):
        rest = len(position.probs) - 1  # the cells before it are the first tokens of the list
        for name, found in probs.items():
            laws[name][number, :rest] = found[number, :rest]
            laws[name][number, rest] = max(0.0, 1.0 - found[number, :rest].sum())
    cells = [position.cell_of(token) for position, token in zip(positions, drafts, strict=True)]
    favourites = {"draft": np.array(cells), "target": np.zeros(len(cells), dtype=int)}
    return Recorded(list(listed), positions, laws, favourites)


class Simulation:
    """Audits of servers that draw from recorded positions.

    Args:
        recorded: The positions.
        alpha: Probability of a false alarm of an audit.
        num_pairs: Pairs of tokens by which an audit compares choices, each at another position.
        knows_draft: Whether an audit knows the draft's most likely token of each position.
    """

    def __init__(
        self, recorded: Recorded, alpha: float, num_pairs: int, *, knows_draft: bool = False
    ) -> None:
        self._recorded = recorded
        self._threshold, self._pair_threshold = (
            -math.log(alpha * ALPHA[name]) for name in ("law", "independence")
        )
        count = len(recorded.positions)
        self._factors = np.zeros((count, _WIDTH, len(ALTERNATIVES)), dtype=np.float32)
        test = LawTest(alpha * ALPHA["law"], LISTED)
        for number, (listed, position) in enumerate(zip(recorded.listed, recorded.positions, strict=True)):
            test.observe(None, listed)
            if not position.is_certain:
                bets = Bets(position, int(recorded.favourites["draft"][number]) if knows_draft else None)
                for cell in range(len(position.probs)):
                    self._factors[number, cell] = bets.log_factors(cell)
        self._smallest = test.smallest_detectable()
        self._pairs = np.linspace(0, count - 1, num_pairs).astype(int)
        self._pair_factors: dict[tuple[int, int, int], list[float]] = {}

    def draw(self, fault: Fault, places: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the cell that is drawn at each place."""
        edges = self._recorded.laws[fault.law][places].cumsum(axis=1)
        cells = (rng.random((len(places), 1)) * edges[:, -1:] > edges).sum(axis=1)
        replaced = rng.random(len(places)) < fault.share
        return np.where(replaced, self._recorded.favourites[fault.by][places], cells)

    def law_test(
        self, places: np.ndarray, cells: np.ndarray, wealth: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the logarithms of the e-value after each token, and of the gamblers' wealth at the end."""
        wealths = self._factors[places, cells].cumsum(axis=0, dtype=np.float64) + wealth
        return _log_sums(wealths), wealths[-1]

    def tokens_needed(self, fault: Fault, num_tokens: int, rng: np.random.Generator) -> tuple[float, str]:
        """Return after how many tokens an audit rejects, or infinity, and the strongest alternative then."""
        count = len(self._recorded.positions)
        start, wealth = int(rng.integers(count)), np.array(LOG_STAKES)
        for done in range(0, num_tokens, CHUNK):
            places = (start + done + np.arange(min(CHUNK, num_tokens - done))) % count
            values, wealth = self.law_test(places, self.draw(fault, places, rng), wealth)
            if (needed := _first(values >= self._threshold)) < math.inf:
                return done + needed, ALTERNATIVES[wealth.argmax()]
        return math.inf, ""

    def pairs_needed(self, recycled: float, rng: np.random.Generator) -> float:
        """Return after how many pairs an audit rejects, or infinity, where a share of them are copies."""
        firsts, seconds = (self.draw(HONEST, self._pairs, rng) for _ in range(2))
        seconds = np.where(rng.random(len(firsts)) < recycled, firsts, seconds)
        drawn = zip(self._pairs.tolist(), firsts.tolist(), seconds.tolist(), strict=True)
        wealths = np.cumsum([self._pair(*cells) for cells in drawn], axis=0)
        return _first(_log_sums(wealths) - math.log(wealths.shape[1]) >= self._pair_threshold)

    def tokens_for_power(self, fault: Fault) -> float:
        """Return from how many tokens on `smallest_detectable` names the fault; infinity if it never does."""
        if not fault.family:
            return math.inf
        smallest = self._smallest[fault.family]
        if fault.family.startswith("temperature"):
            smallest = abs(1 / smallest - 1)
        return len(self._recorded.positions) * (smallest / fault.size) ** 2

    def _pair(self, place: int, first: int, second: int) -> list[float]:
        position = self._recorded.positions[place]
        if position.is_certain:
            return [0.0] * _PAIR_ALTERNATIVES
        key = place, first, second
        if key not in self._pair_factors:
            self._pair_factors[key] = pair_log_factors(position, position, first, second)
        return self._pair_factors[key]


def _log_sums(wealths: np.ndarray) -> np.ndarray:
    most = wealths.max(axis=1)
    sums = np.exp((wealths - most[:, None]).astype(np.float32)).sum(axis=1, dtype=np.float64)
    return most + np.log(sums)


def _first(crossed: np.ndarray) -> float:
    return int(crossed.argmax()) + 1 if crossed.any() else math.inf


def _quantile(needed: Sequence[float], share: float) -> float | None:
    """Return the number of tokens within which a share of the audits rejects; None: more audits do not."""
    found = sorted(needed)[math.ceil(share * len(needed)) - 1]
    return None if math.isinf(found) else found


def measure(simulation: Simulation, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Simulate honest audits and faulty servers, and return what they gave."""
    rng = np.random.default_rng(1)
    alarms = {"law": 0, "independence": 0, "audits": 0}
    for _ in range(options.audits):
        by_law = math.isfinite(simulation.tokens_needed(HONEST, options.tokens_of_audit, rng)[0])
        by_pairs = math.isfinite(simulation.pairs_needed(0.0, rng))
        alarms["law"] += by_law
        alarms["independence"] += by_pairs
        alarms["audits"] += by_law or by_pairs
    console.print(f"false alarms of {options.audits} audits: {alarms}")
    table = plain_table(
        "tokens needed", ("fault", "median", "90 %", "found", "80 % promised from", "found by then")
    )
    rows = []
    for fault in FAULTS:
        outcomes = [simulation.tokens_needed(fault, fault.most, rng) for _ in range(options.runs)]
        rows.append(_row(fault.name, [needed for needed, _ in outcomes], simulation.tokens_for_power(fault)))
        rows[-1]["strongest"] = Counter(name for _, name in outcomes if name).most_common(3)
    for recycled in (1.0, 0.2, 0.1):
        needed = [simulation.pairs_needed(recycled, rng) for _ in range(options.runs)]
        rows.append(_row(f"{recycled:.0%} of pairs share a number", needed, math.inf))
    for row in rows:
        shown = (row["median"], row["90 %"], f"{row['found']:.0%}", row["promised"], row["found_as_promised"])
        table.add_row(row["fault"], *("" if value is None else str(value) for value in shown))
    console.print(table)
    return {"false_alarms": alarms, "faults": rows}


def _row(name: str, needed: Sequence[float], promised: float) -> dict[str, Any]:
    row = {
        "fault": name,
        "median": _quantile(needed, 0.5),
        "90 %": _quantile(needed, 0.9),
        "found": sum(map(math.isfinite, needed)) / len(needed),
        "promised": None,
        "found_as_promised": None,
    }
    if math.isfinite(promised):
        row["promised"] = round(promised)
        row["found_as_promised"] = sum(number <= promised for number in needed) / len(needed)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Record, simulate, print the table and write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo")
    parser.add_argument("--prompts", type=int, default=40, help="texts that are recorded")
    parser.add_argument("--tokens", type=int, default=160, help="of each text")
    parser.add_argument("--reported", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--audits", type=int, default=1000, help="of an honest server")
    parser.add_argument("--tokens-of-audit", type=int, default=20_000, help="of each of them")
    parser.add_argument("--pairs", type=int, default=400, help="of tokens in each audit")
    parser.add_argument("--runs", type=int, default=200, help="audits of each faulty server")
    parser.add_argument("--alpha", type=float, default=0.005)
    parser.add_argument("--known-draft", action="store_true", help="as with gammaray audit --reference-draft")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    console = Console()
    if options.target == "demo":
        prompts = workloads.prompts("mixed", options.prompts)
    else:
        tokenizer = Tokenizer(resolve_model(options.target, "target"))
        tasks = load_tasks(count=-(-options.prompts // 7))[: options.prompts]
        prompts = [tokenizer.render_chat(task.messages) for task in tasks]
    reported = getattr(torch, options.reported)
    recorded = record(options.target, options.draft, prompts, options.tokens, reported)
    console.print(f"{len(recorded.positions)} positions recorded")
    simulation = Simulation(recorded, options.alpha, options.pairs, knows_draft=options.known_draft)
    found = measure(simulation, options, console)
    result = {"settings": settings_of(options), **found}
    console.print(f"written: {write_result('audit-simulation', result, options.out)}")


if __name__ == "__main__":
    main()
