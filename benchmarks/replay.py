"""How close adaptive gamma comes to the best fixed one, on real acceptance but without the machine's noise.

    python -m benchmarks.replay --prompts 1     # a minute: the demo pair
    python -m benchmarks.replay --target build/models/qwen2.5-coder-1.5b \
        --draft build/models/qwen2.5-coder-0.5b --skip 1      # ten minutes, after `make qwen`
    python -m benchmarks.replay --result benchmarks/results/replay-2026-11-30.json     # without models

A cluster completes prompts of each category with a fixed gamma. At which positions the draft's token is the
target's does not depend on gamma, as verification is coupled. Further completions measure what cycles cost at
each gamma: the verification, the wait for a proposal that was not prepared, and how often it was. Then every
fixed gamma, and the controller of the product, play the same texts with these costs, in any order, which no
run on a shared machine could repeat often enough. The controller sees the costs with noise. Look-ups in known
text take no part.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cluster import connected, run_or_exit
from benchmarks.peers.stacks import cycles_of
from benchmarks.prompts import CATEGORIES
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.run import chat_prompts
from gammaray import AsyncClient
from gammaray.bench.systems import Ask, Stack
from gammaray.bench.tables import plain_table
from gammaray.blocks import Shape, VerifyTiming
from gammaray.demo_pair import DEMO_PAIR
from gammaray.types import DrafterKind, TokenOrigin
from gammaray.wire.cycles import CycleRecord
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.control.costs import CostModel
from orchestrator.control.row_costs import RowCosts
from orchestrator.cycle.types import Candidates, Cycle

MAX_GAMMA = 8
SWEEP = (0, 1, 2, 3, 4, 6, MAX_GAMMA)
"""Gammas whose cycles are measured; the others' costs are between those of their neighbours."""

NOISE, DRIFT = 0.1, 0.03
"""Relative standard deviations of a wait, and of the change of all waits per cycle, which returns to the mean
with a memory of 20 cycles: a machine that others use, too."""

BY_MODEL = Candidates((DrafterKind.MODEL,))


@dataclass(frozen=True)
class Text:
    category: str
    temperature: float
    is_agreed: tuple[bool | None, ...]  # by token: whether it is the draft's; None where none was proposed


@dataclass(frozen=True)
class CycleCosts:
    """Medians of a pair's cycles, in seconds."""

    verify_s: tuple[float, ...]  # by proposed tokens, 0 to MAX_GAMMA
    miss_s: float  # wait for a proposal that was not prepared, without its forwards
    forward_s: float  # of the draft, by token of that proposal
    hit_s: float  # wait for a prepared proposal
    # By proposed tokens, 0 to MAX_GAMMA: share of prepared proposals after a rejection, and after none.
    hits: tuple[tuple[float, ...], tuple[float, ...]]

    @property
    def rows(self) -> RowCosts:
        """What a target worker would say of its forwards over 1, 2, 4, 8 and 16 tokens."""
        verify_s = self.verify_s
        last = verify_s[7] + 8 * (verify_s[MAX_GAMMA] - verify_s[MAX_GAMMA - 1])
        return RowCosts([verify_s[0], verify_s[1], verify_s[3], verify_s[7], last])


def agreement(cycles: Sequence[CycleRecord]) -> tuple[bool | None, ...]:
    """Return by emitted token whether it is the draft's."""
    found: list[bool | None] = []
    for cycle in cycles:
        last = None if cycle.accepted == cycle.drafted else False
        found += [*[True] * cycle.accepted, last][: cycle.emitted]
    return tuple(found)


def costs_of(by_gamma: dict[int, list[Sequence[CycleRecord]]]) -> CycleCosts:
    """Return the costs of completions by gamma; their first cycles, with the prompt, are left out."""
    verify, waits, hit_waits = dict[int, list[float]](), list[tuple[int, float]](), list[float]()
    was_hit: dict[bool, dict[int, list[float]]] = {False: {}, True: {}}
    for gamma, completions in by_gamma.items():
        for cycles in completions:
            for before, cycle in itertools.pairwise(cycles[1:]):
                if cycle.drafted != gamma or before.drafted != gamma:
                    continue
                verify.setdefault(gamma, []).append(cycle.verify_s)
                if gamma == 0:
                    continue
                known = was_hit[before.accepted == before.drafted]
                known.setdefault(gamma, []).append(cycle.draft_ahead_hit)
                if cycle.draft_ahead_hit:
                    hit_waits.append(cycle.propose_s)
                else:
                    waits.append((gamma, cycle.propose_s))
    verify_s = _interpolated(verify, statistics.median)
    forward_s, miss_s = np.polyfit(*zip(*waits, strict=True), 1) if len(waits) > 1 else (0.0, 0.0)
    rejected, accepted = (_interpolated(found) for found in was_hit.values())
    return CycleCosts(
        verify_s,
        max(0.0, float(miss_s)),
        max(0.0, float(forward_s)),
        statistics.median(hit_waits) if hit_waits else 0.0,
        (rejected, accepted),
    )


def _interpolated(
    by_gamma: dict[int, list[float]], mean: Callable[[list[float]], float] = statistics.mean
) -> tuple[float, ...]:
    """Return the mean of each gamma from 0 to MAX_GAMMA; 0 if there is none at all."""
    known = sorted(by_gamma)
    found = (
        np.interp(range(MAX_GAMMA + 1), known, [mean(by_gamma[gamma]) for gamma in known]) if known else ()
    )
    return tuple(map(float, found)) or (0.0,) * (MAX_GAMMA + 1)


def play(
    text: Text,
    costs: CycleCosts,
    rng: random.Random,
    next_shape: Callable[[], Shape],
    observe: Callable[[Cycle], None],
) -> tuple[float, int, list[int]]:
    """Return the seconds and tokens of a completion after its first cycle, and the gammas of its cycles."""
    known = [found for found in text.is_agreed if found is not None]
    alpha = sum(known) / len(known) if known else 0.0
    agreed = [rng.random() < alpha if found is None else found for found in text.is_agreed]
    position, total_s, drift, gammas = 0, 0.0, 0.0, list[int]()
    num_before, drafted, num_first, was_accepted, is_first = 0, 0, 0, False, True
    while position < len(agreed):
        shape = next_shape()
        gamma, left = shape.depth, agreed[position:]
        accepted = next((n for n, found in enumerate(left[:gamma]) if not found), min(gamma, len(left)))
        wait_s, is_prepared = 0.0, False
        if gamma:
            is_prepared = num_before > 0 and rng.random() < costs.hits[was_accepted][drafted]
            gamma = min(gamma, num_before) if is_prepared else min(gamma, shape.drafted_depth or gamma)
            accepted = min(accepted, gamma)
            wait_s = costs.hit_s if is_prepared else costs.miss_s + costs.forward_s * gamma
        drift = 0.95 * drift + rng.gauss(0.0, DRIFT)
        slow = max(0.5, 1.0 + drift)
        verify_s = costs.verify_s[gamma]
        if not is_first:
            total_s += wait_s + verify_s
            gammas.append(gamma)
        wait_s *= slow * max(0.5, rng.gauss(1.0, NOISE))
        verify_s *= slow * max(0.5, rng.gauss(1.0, NOISE))
        observe(_cycle(shape, gamma, accepted, wait_s, verify_s, is_first=is_first, is_prepared=is_prepared))
        position += accepted + 1
        if is_first:
            num_first = position
        num_before, drafted, was_accepted, is_first = shape.depth, gamma, accepted == gamma, False
    return total_s, len(agreed) - num_first, gammas


def _cycle(
    shape: Shape,
    gamma: int,
    accepted: int,
    wait_s: float,
    verify_s: float,
    *,
    is_first: bool,
    is_prepared: bool,
) -> Cycle:
    tested = min(gamma, accepted + 1)
    return Cycle(
        gamma=shape.depth,
        num_drafted=gamma,
        num_tested=tested,
        num_accepted=accepted,
        token_ids=(0,) * (accepted + 1),
        origins=(*[TokenOrigin.ACCEPTED] * accepted, TokenOrigin.BONUS),
        logprobs=(),
        text="",
        finish_reason=None,
        draft_s=wait_s,
        verify_s=verify_s,
        total_s=wait_s + verify_s,
        is_first=is_first,
        is_prepared=is_prepared,
        draft_failed=False,
        shape=shape,
        levels=tuple((1, 0 if depth < accepted else -1) for depth in range(tested)),
        timing=VerifyTiming(0.0, verify_s, 1, gamma + 1, gamma + 1),
    )


def replay(texts: Sequence[Text], costs: CycleCosts, repetitions: int) -> list[dict[str, Any]]:
    """Return by text the tokens/s of each fixed gamma and of the controller: of a new replica, and after.

    A replica's sessions are the texts, in random order, twice: its controller knows nothing at first, and has
    seen the other texts the second time.
    """
    rows: list[dict[str, Any]] = []
    for text in texts:
        fixed = []
        for gamma in range(MAX_GAMMA + 1):
            runs = [
                play(text, costs, random.Random(seed), partial(Shape, gamma), lambda _: None)
                for seed in range(repetitions)
            ]
            fixed.append(sum(run[1] for run in runs) / sum(run[0] for run in runs))
        rows.append({"category": text.category, "temperature": text.temperature, "fixed": fixed})
    for name, turn in (("new", 0), ("known", 1)):
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in texts]
        for seed in range(repetitions):
            rng, model = random.Random(seed), CostModel(random.Random(seed))
            model.rows = costs.rows
            for current in range(turn + 1):
                for index in rng.sample(range(len(texts)), len(texts)):
                    controller = AdaptiveGamma(MAX_GAMMA, model)
                    shape_of = partial(controller.next_shape, BY_MODEL)
                    seconds, tokens, gammas = play(texts[index], costs, rng, shape_of, controller.observe)
                    if current == turn:
                        added = (seconds, tokens, sum(gammas), len(gammas))
                        sums[index] = [a + b for a, b in zip(sums[index], added, strict=True)]
        for row, (seconds, tokens, gamma_sum, cycles) in zip(rows, sums, strict=True):
            best = max(row["fixed"])
            row[name] = {"over_best": tokens / seconds / best, "gamma_mean": gamma_sum / cycles}
    return rows


async def collect(client: AsyncClient, options: Any, console: Console) -> tuple[list[Text], CycleCosts]:
    """Return the texts, and the costs of cycles."""
    prompts = chat_prompts(options.target, CATEGORIES, options.skip + options.prompts)
    by_category: dict[str, list[str]] = {}
    for category, prompt in prompts:
        by_category.setdefault(category, []).append(prompt)
    by_gamma: dict[int, list[Sequence[CycleRecord]]] = {}
    texts: list[Text] = []
    for category, found in by_category.items():
        for seed, prompt in enumerate(found[options.skip :]):
            for temperature in options.temperatures:
                sample = await Stack(str(MAX_GAMMA), client).sample(
                    Ask(prompt, options.tokens, temperature, seed)
                )
                cycles = await cycles_of(client, sample)
                texts.append(Text(category, temperature, agreement(cycles)))
                console.print(f"{category}, temperature {temperature:g}: {len(cycles)} cycles")
    rng = random.Random(0)
    for found in list(by_category.values())[: options.swept]:
        for gamma in rng.sample(SWEEP, len(SWEEP)):  # the machine becomes slower and faster by the minute
            sample = await Stack(str(gamma), client).sample(Ask(found[-1], options.tokens, 0.0, 0))
            by_gamma.setdefault(gamma, []).append(await cycles_of(client, sample))
    return texts, costs_of(by_gamma)


def load(path: Path) -> tuple[list[Text], CycleCosts]:
    """Return the texts and costs of a result."""
    found = json.loads(path.read_text(encoding="utf-8"))
    texts = [Text(**{**text, "is_agreed": tuple(text["is_agreed"])}) for text in found["texts"]]
    hits = found["costs"]["hits"]  # until 2026-11-30 one share for all gammas
    found["costs"]["hits"] = [one if isinstance(one, list) else [one] * (MAX_GAMMA + 1) for one in hits]
    return texts, CycleCosts(**found["costs"])


async def run(options: Any) -> dict[str, Any]:
    """Collect, unless a result is given, and replay; return the result, JSON-ready."""
    console = Console()
    if options.result is not None:
        texts, costs = load(Path(options.result))
    else:
        console.print("starting the cluster ...")
        how = {"weights": options.draft_weights, "dtype": options.dtype}
        async with connected(options.target, options.draft, **how) as client:
            texts, costs = await collect(client, options, console)
    rows = replay(texts, costs, options.repetitions)
    table = plain_table(
        "adaptive over the best fixed gamma", ["text", "T", "best", "x gamma 0", "new", "known", "gamma"]
    )
    for row in rows:
        fixed, known = row["fixed"], row["known"]
        cells = row["new"]["over_best"], known["over_best"], known["gamma_mean"]
        best = fixed.index(max(fixed))
        table.add_row(
            row["category"],
            f"{row['temperature']:g}",
            str(best),
            f"{fixed[best] / fixed[0]:.2f}",
            *(f"{cell:.2f}" for cell in cells),
        )
    console.print(table)
    means = {name: statistics.mean(row[name]["over_best"] for row in rows) for name in ("new", "known")}
    console.print(", ".join(f"{name} replica: {mean:.3f}" for name, mean in means.items()))
    return {
        "settings": settings_of(options),
        "costs": vars(costs),
        "means": means,
        "rows": rows,
        "texts": [vars(text) for text in texts],
    }


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft", default=DEMO_PAIR, help="directory or hub name")
    parser.add_argument("--draft-weights", choices=("auto", "int8"), default="int8")
    parser.add_argument("--dtype", default="auto", help="of the workers' arithmetic")
    parser.add_argument("--prompts", type=int, default=1, help="of each category (default: 1)")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each category before them")
    parser.add_argument("--tokens", type=int, default=128, help="per completion (default: 128)")
    parser.add_argument("--swept", type=int, default=2, help="categories whose costs are measured")
    parser.add_argument(
        "--temperatures", type=lambda text: [float(t) for t in text.split(",")], default=[0.0, 1.0]
    )
    parser.add_argument("--result", help="whose texts and costs are played again")
    parser.add_argument("--repetitions", type=int, default=40, help="of each replay (default: 40)")
    options = parser.parse_args()
    result = run_or_exit(run(options))
    print(f"written: {write_result('replay', result, options.out)}")


if __name__ == "__main__":
    main()
