"""Tokens per cycle of the verification methods, served or not, on the same texts and with equal nodes.

    python -m benchmarks.verifiers

Texts of the target are recorded with both models' distributions at each position. As verification emits
tokens of the target's law, the acceptance of a method follows from these (`verification_rules.py`): for
chains and for children drawn with replacement exactly, else as a mean over draws at each position. Rejection,
block, SpecInfer and SpecTr draw from what a draft worker ships, `--top-k` tokens with quantised weights;
coupled and naive verification ship nothing and draw from the draft's whole distribution.

A tree has one shape for all cycles of a method: the best of several for it. `as served` are cycles of the
workers' own code after the same prompts, where the draft chooses the shape of each tree anew.

Pairs: synthetic ones, in which each position has new distributions over 512 tokens and the draft is the
target with noise on its logits; the demo pair on Python code; SmolLM2 with its drafter on the chat tasks, if
`make smollm2` made it.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from rich.console import Console
from torch import Tensor

from benchmarks import workloads
from benchmarks.prompts import load_tasks
from benchmarks.provenance import write_result
from benchmarks.verification_rules import (
    block_survival,
    rejection_survival,
    specinfer_ranks,
    spectr_ranks,
)
from gammaray.bench.prompts import fingerprint
from gammaray.bench.tables import plain_table
from gammaray.demo_pair import resolve_model
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from gammaray.wire.blocks import proposal_to_proto
from orchestrator.text.tokenizer import Tokenizer
from services.draft_worker.scheduler import DraftScheduler
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.sampling.logits import processed_log_probs
from services.qualify.loop import Ask, MeasuredCycle, Pair
from services.scheduling.planning import Limits
from services.speculation.predictions import quantise
from services.target_worker.scheduler import TargetScheduler

LIMITS = Limits(max_batch_tokens=1024, prefill_chunk=256)
NODES = (4, 8, 16)
MAX_CHILDREN = 8
_MODELS = {"demo": ("demo", "demo"), "smollm2": ("build/models/smollm2", "benchmarks/drafters/smollm2")}
_PAIRS = ("synthetic", *_MODELS)
_SYNTHETIC_SIZE = 512
_WEIGHT_BITS = 12
_TOKEN_BYTES = 3

Tree: TypeAlias = tuple["Tree", ...]
"""The subtrees of a node's children, in the order in which these are offered."""

Survival: TypeAlias = Callable[[Sequence["Position"]], Sequence[float]]
"""From a text to the probabilities that 1, 2, ... of its tokens are accepted."""


@dataclass(frozen=True)
class Position:
    """What the methods make of one token of a target's text.

    Attributes:
        p: The target's probability of the token.
        draft: The shipped draft distribution's.
        overlap: 1 - total variation of the two.
        wire_bytes: Size of the draft distribution in a proposal.
        coupled: Probability that a coupled chain accepts the token.
        naive: Probability that a draw of the draft equals it.
        ranks: By method of trees: entry k - 1 has, for k children, the probability that the token is accepted
            as each of them.
    """

    p: float
    draft: float
    overlap: float
    wire_bytes: int
    coupled: float
    naive: float
    ranks: Mapping[str, Sequence[Sequence[float]]]


def record(
    log_p: Tensor, log_q: Tensor, token: int, *, top_k: int, draws: int, generator: torch.Generator
) -> Position:
    """Return what the methods make of `token`, which the target drew.

    Args:
        log_p: The target's processed log-probabilities, [vocab_size].
        log_q: The draft's.
        token: The token.
        top_k: Tokens of a shipped distribution at most; the weights are quantised.
        draws: Draws to average over, where no closed form is used.
        generator: Source of the draws.
    """
    p, q = log_p.double().exp(), log_q.double().exp()
    shipped = quantise(q, top_k, _WEIGHT_BITS)
    # The tokens that may be shipped, and all others as one.
    short_q = [weight / 2**_WEIGHT_BITS for weight in shipped.weights] + [0.0]
    short_p = p[list(shipped.token_ids)].tolist()
    short_p.append(max(0.0, 1.0 - math.fsum(short_p)))
    is_shipped = token in shipped.token_ids
    column = shipped.token_ids.index(token) if is_shipped else len(short_p) - 1
    p_token, q_token = float(p[token]), float(q[token])
    agreement = torch.maximum(p * q_token, q * p_token).sum() if q_token else torch.tensor(1.0)
    ranks: dict[str, Sequence[Sequence[float]]] = {
        "coupled": [_coupled_ranks(p, q, token, draws, generator)] * MAX_CHILDREN
    }
    counts = range(1, MAX_CHILDREN + 1)
    if is_shipped:
        alone = [share / p_token for share in specinfer_ranks(short_p, short_q, column, MAX_CHILDREN)]
        ranks["specinfer"] = [alone] * MAX_CHILDREN
        ranks["specinfer-without"] = [
            _ranks_without(short_p, short_q, column, draws, generator)
        ] * MAX_CHILDREN
        ranks["spectr"] = [
            [float(share) / p_token for share in spectr_ranks(short_p, short_q, column, count)]
            for count in counts
        ]
    else:
        for name in ("specinfer", "specinfer-without", "spectr"):
            ranks[name] = [[0.0] * MAX_CHILDREN] * MAX_CHILDREN
    return Position(
        p=p_token,
        draft=short_q[column],
        overlap=math.fsum(map(min, short_p, short_q)),
        wire_bytes=proposal_to_proto(Proposal((token,), None, (shipped,))).ByteSize() - 5,
        coupled=q_token / float(agreement),
        naive=q_token,
        ranks=ranks,
    )


def _coupled_ranks(p: Tensor, q: Tensor, token: int, draws: int, generator: torch.Generator) -> list[float]:
    """Return how often `token` is the draft's best, second, ... token under the noise that it shares.

    The noise E is exponential, and the target draws the least E / p. Given that this is `token`, with the
    value m, m is exponential of rate 1 and every other E is p m plus a new exponential.
    """
    least = torch.empty(draws, 1, dtype=torch.float64).exponential_(generator=generator)
    noise = torch.empty(draws, len(p), dtype=torch.float64).exponential_(generator=generator)
    noise += p * least
    noise[:, token] = p[token] * least[:, 0]
    arrivals = noise / q
    rank = (arrivals < arrivals[:, token : token + 1]).sum(dim=1)
    found = rank[arrivals[:, token].isfinite()]
    return [float((found == number).sum()) / draws for number in range(MAX_CHILDREN)]


def _ranks_without(
    p: Sequence[float], q: Sequence[float], column: int, draws: int, generator: torch.Generator
) -> list[float]:
    """Return the mean of SpecInfer's ranks over children drawn without replacement, given the token."""
    count = min(MAX_CHILDREN, sum(share > 0 for share in q))
    sums = [0.0] * MAX_CHILDREN
    drawn = torch.multinomial(
        torch.tensor(q, dtype=torch.float64).expand(draws, -1), max(1, count - 1), generator=generator
    )
    for children in drawn.tolist():
        for rank, share in enumerate(specinfer_ranks(p, q, column, count, children[: count - 1])):
            sums[rank] += share / (draws * p[column])
    return sums


def best_tree(ranks: Sequence[float], num_nodes: int) -> Tree:
    """Return the tree of the nodes that are accepted most likely, if ranks were accepted alike everywhere."""
    children: dict[tuple[int, ...], int] = {(): 0}
    heap: list[tuple[float, tuple[int, ...]]] = [(-ranks[0], (0,))]
    while heap and len(children) <= num_nodes:
        prob, path = heapq.heappop(heap)
        children[path] = 0
        children[path[:-1]] += 1
        heapq.heappush(heap, (prob * ranks[0], (*path, 0)))
        after = path[-1] + 1
        if after < len(ranks) and ranks[after] > 0 and ranks[path[-1]] > 0:
            heapq.heappush(heap, (prob / ranks[path[-1]] * ranks[after], (*path[:-1], after)))

    def subtree(path: tuple[int, ...]) -> Tree:
        return tuple(subtree((*path, rank)) for rank in range(children[path]))

    return subtree(())


def accepted_depths(tree: Tree, method: str, text: Sequence[Position]) -> list[float]:
    """Return the probability that 1, 2, ... tokens are accepted in a cycle that begins before a text."""
    survival: list[float] = []

    def walk(node: Tree, depth: int, reached: float) -> None:
        if not node or depth == len(text) or reached == 0:
            return
        if depth == len(survival):
            survival.append(0.0)
        for share, child in zip(text[depth].ranks[method][len(node) - 1], node, strict=False):
            survival[depth] += reached * share
            walk(child, depth + 1, reached * share)

    walk(tree, 0, 1.0)
    return survival


def tokens_per_cycle(texts: Sequence[Sequence[Position]], survival_of: Survival) -> float:
    """Return tokens per cycle, where each cycle begins after the last one.

    Cycles of all methods are counted up to the same position, from which the largest chain has room.

    Args:
        texts: Texts of the target.
        survival_of: Returns the probability that 1, 2, ... tokens are accepted in a cycle before a text.
    """
    tokens = cycles = 0.0
    for text in texts:
        starts = max(1, len(text) - max(NODES))
        begun = [1.0] + [0.0] * starts
        for start in range(starts):
            survival = [1.0, *survival_of(text[start : start + max(NODES)])]
            tokens += begun[start] * math.fsum(survival)
            cycles += begun[start]
            for length, (now, after) in enumerate(zip(survival, [*survival[1:], 0.0], strict=True), 1):
                begun[min(start + length, starts)] += begun[start] * (now - after)
    return tokens / cycles


def _products(tests: Iterable[float]) -> list[float]:
    return list(itertools.accumulate(tests, operator.mul))


def _pairs(text: Sequence[Position]) -> list[tuple[float, float]]:
    return [(at.p, at.draft) for at in text]


CHAINS: Mapping[str, Survival] = {
    "naive chain": lambda text: _products(at.naive for at in text),
    "coupled chain": lambda text: _products(at.coupled for at in text),
    "rejection chain": lambda text: [float(left) for left in rejection_survival(_pairs(text))],
    "block chain": lambda text: [float(left) for left in block_survival(_pairs(text))],
}
TREES = {
    "coupled tree": "coupled",
    "SpecInfer": "specinfer",
    "SpecInfer without": "specinfer-without",
    "SpecTr": "spectr",
}


def _depth(tree: Tree) -> int:
    return max((1 + _depth(child) for child in tree), default=0)


def _num_inner(tree: Tree) -> int:
    """The nodes that have children, the root included: so many draft distributions a tree has."""
    return (1 + sum(map(_num_inner, tree))) if tree else 0


def compare(texts: Sequence[Sequence[Position]]) -> list[dict[str, Any]]:
    """Return tokens per cycle of every method, by number of nodes."""
    everything = [position for text in texts for position in text]
    q_bytes = fmean(position.wire_bytes for position in everything)
    rows = []
    for nodes in NODES:
        for name, chain in CHAINS.items():
            tokens = tokens_per_cycle(texts, lambda text, of=chain, most=nodes: of(text[:most]))  # type: ignore[misc]
            ships = name in ("rejection chain", "block chain")
            sent = nodes * (_TOKEN_BYTES + ships * q_bytes)
            rows.append({"nodes": nodes, "method": name, "tokens": tokens, "depth": nodes, "bytes": sent})
        shapes = _shapes(everything, nodes)
        for name, method in TREES.items():
            found = [
                (tokens_per_cycle(texts, functools.partial(accepted_depths, tree, method)), tree)
                for tree in shapes
            ]
            tokens, tree = max(found)
            ships = method != "coupled"
            sent = nodes * (_TOKEN_BYTES + 1) + ships * _num_inner(tree) * q_bytes
            rows.append(
                {"nodes": nodes, "method": name, "tokens": tokens, "depth": _depth(tree), "bytes": sent}
            )
    return rows


def _shapes(positions: Sequence[Position], nodes: int) -> list[Tree]:
    """Return trees that are best for the ranks of some method, with children up to several numbers."""
    shapes = set()
    for method, width in itertools.product(TREES.values(), (1, 2, 3, 4, MAX_CHILDREN)):
        ranks = [fmean(at.ranks[method][width - 1][rank] for at in positions) for rank in range(width)]
        shapes.add(best_tree(ranks, nodes))
    return sorted(shapes)


def synthetic(overlap: float, count: int, top_k: int, draws: int) -> list[Position]:
    """Return positions with a mean overlap of target and draft; the pairs of positions are independent."""
    low, high = 0.0, 8.0
    for _ in range(12):
        middle = (low + high) / 2
        pairs = list(_random_pairs(middle, 300))
        mean = fmean(float(torch.minimum(p.exp(), q.exp()).sum()) for p, q in pairs)
        low, high = (middle, high) if mean > overlap else (low, middle)
    generator = torch.Generator().manual_seed(1)
    found = []
    for p, q in _random_pairs(low, count):
        token = int(torch.multinomial(p.exp(), 1, generator=generator))
        found.append(record(p, q, token, top_k=top_k, draws=draws, generator=generator))
    return found


def _random_pairs(noise: float, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield log-probabilities of targets by Zipf's law with noise, and of their drafts with more of it."""
    generator = torch.Generator().manual_seed(0)
    ranks = torch.arange(1, _SYNTHETIC_SIZE + 1, dtype=torch.float64).log()
    for number in range(count):
        exponent = 1.1 + 2.4 * random.Random(number).random()
        disturbed = torch.randn(2, _SYNTHETIC_SIZE, generator=generator, dtype=torch.float64)
        p = (0.5 * disturbed[0] - exponent * ranks).log_softmax(-1)
        yield p, (p + noise * disturbed[1]).log_softmax(-1)


class Models:
    """A target and a draft in this process."""

    def __init__(self, target: str, draft: str, top_k: int) -> None:
        path = resolve_model(target, "target")
        self._tokenizer = Tokenizer(path)
        self._target, self._top_k = load_engine(path), top_k
        # Two engines: a scheduler may reduce its own to the logits of the draft's tokens.
        self._draft, served = (load_engine(resolve_model(draft, "draft"), draft_for=path) for _ in range(2))
        self._pair = Pair(
            TargetScheduler(self._target, LIMITS, draft_ahead=False),
            DraftScheduler(served, LIMITS, draft_top_k=top_k, ahead_rows=0),
        )

    def texts(
        self, prompts: Sequence[str], temperature: float, num_tokens: int, draws: int
    ) -> list[list[Position]]:
        """Return the positions of a text of the target after each prompt."""
        generator, params = torch.Generator().manual_seed(0), SamplingParams(temperature=temperature)
        found = []
        for ask in self._asks(prompts, temperature, num_tokens):
            output = self._pair.complete(ask, 0).token_ids
            tokens = [*ask.prompt, *output[:-1]]
            p, q = (
                processed_log_probs(_logits(engine, tokens, len(output)), params)
                for engine in (self._target, self._draft)
            )
            found.append(
                [
                    record(p_row, q_row, token, top_k=self._top_k, draws=draws, generator=generator)
                    for p_row, q_row, token in zip(p, q, output, strict=True)
                ]
            )
        return found

    def served(self, prompts: Sequence[str], temperature: float, num_tokens: int) -> list[dict[str, Any]]:
        """Return tokens per cycle of the workers' own cycles."""
        rows = []
        for nodes in NODES:
            for name, method, gamma, max_nodes in (
                ("deep coupled tree", VerificationMethod.COUPLED, nodes - 1, nodes),
                ("flat coupled tree", VerificationMethod.COUPLED, nodes // 2, nodes),
                ("rejection chain", VerificationMethod.REJECTION, nodes, 0),
                ("block chain", VerificationMethod.BLOCK, nodes, 0),
            ):
                cycles = [
                    cycle
                    for ask in self._asks(prompts, temperature, num_tokens, method, max_nodes)
                    for cycle in _with_room(self._pair.complete(ask, gamma).cycles, num_tokens)
                ]
                rows.append(
                    {
                        "nodes": nodes,
                        "method": f"{name}, as served",
                        "tokens": fmean(cycle.num_emitted for cycle in cycles),
                        "depth": gamma,
                        "mean_nodes": fmean(cycle.num_drafted for cycle in cycles),
                    }
                )
        return rows

    def _asks(
        self,
        prompts: Sequence[str],
        temperature: float,
        num_tokens: int,
        method: VerificationMethod = VerificationMethod.COUPLED,
        max_nodes: int = 0,
    ) -> Iterator[Ask]:
        for seed, prompt in enumerate(prompts):
            token_ids = tuple(self._tokenizer.encode(prompt))
            yield Ask(token_ids, num_tokens, temperature, seed, (), method, max_nodes)


def _prompts(target: str, count: int) -> list[str]:
    """Return `count` chat tasks of each category, or for the demo pair seven times as many pieces of code."""
    if target == "demo":
        return workloads.prompts("code", 7 * count)
    tokenizer = Tokenizer(resolve_model(target, "target"))
    return [tokenizer.render_chat(task.messages) for task in load_tasks(count=count)]


def _with_room(cycles: Sequence[MeasuredCycle], num_tokens: int) -> Iterator[MeasuredCycle]:
    """Yield the cycles that begin where the largest chain has room."""
    done = 0
    for cycle in cycles:
        if done < num_tokens - max(NODES):
            yield cycle
        done += cycle.num_emitted


def _logits(engine: Engine, tokens: Sequence[int], count: int) -> Tensor:
    (logits,) = engine.step([SequenceInput("recorded", 0, tokens, count)])
    engine.release("recorded")
    return logits


def _print(console: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = plain_table(title, ("method", *(f"{nodes} nodes" for nodes in NODES), "depth", "bytes a cycle"))
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        table.add_row(
            name,
            *(f"{row['tokens']:.2f}" for row in own),
            " ".join(str(row["depth"]) for row in own),
            " ".join(f"{row['bytes']:.0f}" for row in own if "bytes" in row),
        )
    console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all pairs, print their tables and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--prompts", type=int, default=1, help="chat tasks per category, seven times as much code"
    )
    parser.add_argument("--tokens", type=int, default=160, help="of each text")
    parser.add_argument("--pairs", nargs="+", choices=_PAIRS, default=_PAIRS)
    parser.add_argument("--positions", type=int, default=4000, help="of each synthetic pair")
    parser.add_argument("--draws", type=int, default=32, help="at each position")
    parser.add_argument("--top-k", type=int, default=64, help="tokens of a shipped distribution at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--out", type=Path, help="result file (default: in benchmarks/results)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    console, cases = Console(), list[dict[str, Any]]()

    def add(
        case: dict[str, Any], texts: Sequence[Sequence[Position]], served: Sequence[dict[str, Any]]
    ) -> None:
        overlap = fmean(position.overlap for text in texts for position in text)
        case |= {"overlap": overlap, "rows": [*compare(texts), *served]}
        cases.append(case)
        name = " ".join(str(value) for key, value in case.items() if key in ("pair", "temperature"))
        _print(console, f"{name}, overlap {overlap:.2f}: tokens per cycle", case["rows"])

    for overlap in (0.6, 0.8, 0.9) if "synthetic" in options.pairs else ():
        positions = synthetic(overlap, options.positions, options.top_k, options.draws)
        add({"pair": f"synthetic {overlap:g}"}, [positions], ())
    for pair in (name for name in _MODELS if name in options.pairs):
        target, draft = _MODELS[pair]
        if pair == "smollm2" and not Path(target).is_dir():
            continue
        models = Models(target, draft, options.top_k)
        prompts = _prompts(target, options.prompts)
        for temperature in options.temperatures:
            texts = models.texts(prompts, temperature, options.tokens, options.draws)
            served = models.served(prompts, temperature, options.tokens)
            case = {"pair": pair, "temperature": temperature, "prompts": fingerprint(prompts)}
            add(case, texts, served)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    path = write_result("verifiers", {"settings": settings, "cases": cases}, options.out)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
