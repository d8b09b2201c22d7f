"""Losslessness, token for token, through the whole cluster.

    python -m benchmarks.equivalence                                     # the demo pair
    python -m benchmarks.equivalence --target build/models/smollm2 --ignore-eos --at-once 4

- Temperature 0: the tokens equal those of `transformers` `generate(do_sample=False)` on the same target.
- Temperature 1, coupled: for one seed the tokens are those of gamma 0, with every gamma and drafter. With a
  draft model these are gamma 3, 8 and adaptive, no drafter, another drafter, and eight requests at once;
  without one suffix decoding, a prediction, and all of them, also with past outputs.

Models other than the demo pair complete the chat tasks of `benchmarks/prompts`, rendered by their chat
template, whose token ids are compared with those of transformers' `apply_chat_template`.

The arithmetic of two programs differs in the last bits. Where the two largest logits of `generate` are nearer
to each other than its own noise, and gammaray took the second one, a completion counts as tied, and the rest
of it is not compared. The noise is the largest difference between `generate`, which computes one token after
the other, and one forward of `transformers` over all of them.

Prints counts and the first difference (prompt:token), writes them with their provenance; exits with 1 when a
token differs.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.baselines import Baselines, Gaps, Generated, running_baselines
from benchmarks.cluster import at_once, connected, run_or_exit
from benchmarks.prompts import CATEGORIES, load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from benchmarks.workloads import WORKLOADS, prompts
from gammaray import AsyncClient, Completion
from gammaray.bench.measure import first_difference
from gammaray.bench.prompts import fingerprint
from gammaray.bench.systems import Ask
from gammaray.bench.tables import plain_table
from gammaray.client.request import GenerateOptions
from gammaray.demo_pair import DEMO_PAIR, resolve_model
from gammaray.errors import GammarayError
from gammaray.types import SpeculationSummary
from orchestrator.text.tokenizer import Tokenizer

TASKS = "tasks"
"""Workload of chat tasks."""

AT_ONCE = 8
WITH_DRAFT: dict[str, GenerateOptions] = {
    "gamma 3": {"gamma": 3},
    "gamma 8": {"gamma": 8},
    "adaptive": {},
    "no drafter": {"drafter": "none"},
}
_WITHOUT_DRAFT: dict[str, GenerateOptions] = {
    "default": {},
    "default, with past outputs": {"cache_salt": "default"},
    "suffix decoding, gamma 8": {"drafter": "suffix", "gamma": 8},
}
_BY_PREDICTION: GenerateOptions = {"drafter": "prediction", "gamma": 8}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class Asks:
    """Completions to request.

    Attributes:
        prompts: Text or token ids; the number of each is its seed.
        max_tokens: Upper bound per completion.
        ignore_eos: Continue after end-of-sequence tokens.
        at_once: Requests in flight.
    """

    prompts: tuple[Prompt, ...]
    max_tokens: int
    ignore_eos: bool
    at_once: int


@dataclass(frozen=True)
class Made:
    """Tokens of a completion, and how they were drafted."""

    token_ids: tuple[int, ...]
    summary: SpeculationSummary | None = None

    @classmethod
    def of(cls, completion: Completion) -> Made:
        """Return those of a completion by gammaray."""
        return cls(tuple(token.token_id for token in completion.tokens), completion.summary)


def chat_prompts(
    model: str, categories: Sequence[str], number: int
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Return chat tasks as token ids, and their comparison with transformers' own.

    Args:
        model: Directory of the target, whose chat template renders the tasks.
        categories: Of `benchmarks.prompts`.
        number: Tasks per category.

    Raises:
        ValueError: An unknown category, or more tasks than it has.
        InvalidArgumentError: The model has no chat template.
    """
    ours, theirs = Tokenizer(model), AutoTokenizer.from_pretrained(model)
    tasks = load_tasks(categories, number)
    own = [tuple(ours.encode(ours.render_chat(task.messages))) for task in tasks]
    options = {"add_generation_prompt": True, "return_dict": False}
    expected = [tuple(theirs.apply_chat_template(list(task.messages), **options)) for task in tasks]
    compared = count("prompts by the chat template = apply_chat_template", _made(own), _made(expected))
    return own, compared


async def generated(baselines: Baselines, asks: Asks) -> list[Generated]:
    """Return the greedy completions of `generate`, with gaps."""
    made = (Ask(prompt, asks.max_tokens, ignore_eos=asks.ignore_eos) for prompt in asks.prompts)
    return [await baselines.generate("generate", ask, with_gaps=True) for ask in made]


async def completed(
    client: AsyncClient, asks: Asks, temperature: float, predictions: Sequence[Made] = (), **options: Any
) -> list[Made]:
    """Return gammaray's completions, as many of them at once as the asks say."""

    async def one(number: int) -> Made:
        given = dict(options)
        if predictions:
            given["prediction"] = predictions[number].token_ids
        completion = await client.complete(
            asks.prompts[number],
            max_tokens=asks.max_tokens,
            ignore_eos=asks.ignore_eos,
            temperature=temperature,
            seed=number,
            verification="coupled",
            **given,
        )
        return Made.of(completion)

    return await at_once(len(asks.prompts), asks.at_once, one)


def noise_of(completions: Sequence[Generated]) -> float:
    """Return the largest noise of transformers' gaps between logits."""
    return max((made.gaps.noise for made in completions if made.gaps is not None), default=0.0)


def ties(completions: Sequence[Generated]) -> dict[str, Any]:
    """Return how near the two largest logits came to each other, and how often within the noise."""
    noise = noise_of(completions)
    gaps = [gap for made in completions if made.gaps is not None for gap in made.gaps.gaps]
    return {"noise": noise, "narrowest_gap": min(gaps), "within_noise": sum(gap <= noise for gap in gaps)}


def count(
    name: str,
    got: Sequence[Made],
    expected: Sequence[Made],
    gaps: Sequence[Gaps | None] = (),
    noise: float = 0.0,
) -> dict[str, Any]:
    """Compare completions token by token.

    Args:
        name: Name of the comparison.
        got: gammaray's completions.
        expected: The expected ones.
        gaps: Of the expected ones, if they are those of transformers.
        noise: Gaps up to this are ties.

    Returns:
        How many completions are equal, tied and different, with the place of the first difference of each,
        how many tokens were compared, and how they were drafted.
    """
    tied, different, compared = list[dict[str, Any]](), list[dict[str, Any]](), 0
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        at = first_difference(ours.token_ids, theirs.token_ids)
        compared += len(theirs.token_ids) if at is None else at
        if at is None:
            continue
        found: dict[str, Any] = {"prompt": i, "token": at}
        of = gaps[i] if gaps else None
        if of is None or at >= min(len(ours.token_ids), len(of.gaps)):
            different.append(found)
            continue
        found["ours"], found["theirs"] = ours.token_ids[at], theirs.token_ids[at]
        found["gap"], found["runner_up"] = of.gaps[at], of.runners_up[at]
        is_tie = found["ours"] == found["runner_up"] and found["gap"] <= noise
        (tied if is_tie else different).append(found)
    summaries = [made.summary for made in got if made.summary is not None]
    return {
        "comparison": name,
        "completions": len(got),
        "equal": len(got) - len(tied) - len(different),
        "tokens": compared,
        "tied": tied,
        "different": different,
        "drafted": sum(summary.drafted_tokens for summary in summaries),
        "accepted": sum(summary.accepted_tokens for summary in summaries),
        "cycles": _cycles(summaries),
    }


def _cycles(summaries: Sequence[SpeculationSummary]) -> dict[str, int]:
    """Return how many cycles each drafter proposed in."""
    kinds = ("model", "head", "suffix", "prediction", "plain")
    total: Counter[str] = Counter()
    for summary in summaries:
        total.update({kind: getattr(summary, f"{kind}_cycles") for kind in kinds})
    return {kind: number for kind, number in total.items() if number}


def _made(token_ids: Sequence[tuple[int, ...]]) -> list[Made]:
    return [Made(one) for one in token_ids]


def comparison_table(counts: Sequence[dict[str, Any]]) -> Table:
    """Return the comparisons as a table."""
    columns = ("comparison", "equal", "tied", "tokens", "accepted of drafted", "differs")
    table = plain_table("Completions with the same tokens", columns)
    for one in counts:
        first = one["different"][0] if one["different"] else None
        where = f"{first['prompt']}:{first['token']}" if first else ""
        equal = f"{one['equal']} of {one['completions']}"
        drafted = f"{one['accepted']} of {one['drafted']}" if one["drafted"] else ""
        table.add_row(one["comparison"], equal, str(len(one["tied"])), str(one["tokens"]), drafted, where)
    return table


async def _run(target: str, draft: str | None, asks: Asks, console: Console) -> dict[str, Any]:
    """Return the comparisons of all completions, and what is known about ties."""
    counts: list[dict[str, Any]] = []
    began = time.monotonic()

    def add(*arguments: Any) -> None:
        one = count(*arguments)
        counts.append(one)
        seconds = time.monotonic() - began
        console.print(f"{seconds:5.0f} s  {one['comparison']}: {one['equal']} of {one['completions']}")

    async with running_baselines(target, draft) as baselines, connected(target, draft) as client:
        generating = asyncio.create_task(generated(baselines, asks))  # meanwhile the cluster works
        try:
            plain = await completed(client, asks, 1.0, gamma=0, cache_salt="plain")
            for name, options in (WITH_DRAFT if draft else _WITHOUT_DRAFT).items():
                given = {"cache_salt": name, **options}
                add(f"temperature 1, {name} = gamma 0", await completed(client, asks, 1.0, **given), plain)
            if draft:
                loaded = Asks(asks.prompts, asks.max_tokens, asks.ignore_eos, AT_ONCE)
                made = await completed(client, loaded, 1.0, cache_salt="at once")
                add(f"temperature 1, adaptive, {AT_ONCE} at once = gamma 0", made, plain)
            greedy = {
                name: await completed(client, asks, 0.0, cache_salt=f"greedy, {name}", **options)
                for name, options in _greedy(draft).items()
            }
            greedy_ones = await generating
        finally:
            generating.cancel()
        expected = _made([made.token_ids for made in greedy_ones])
        noise = noise_of(greedy_ones)
        for name, got in greedy.items():
            gaps_of = [made.gaps for made in greedy_ones]
            add(f"temperature 0, {name} = generate", got, expected, gaps_of, noise)
        if not draft:
            made = await completed(client, asks, 1.0, expected, cache_salt="prediction", **_BY_PREDICTION)
            add("temperature 1, the greedy text as prediction, gamma 8 = gamma 0", made, plain)
    if draft:
        # The target as its own draft: another drafter, one whose proposals are nearly always wholly accepted.
        async with connected(target, resolve_model(target, "target")) as client:
            made = await completed(client, asks, 1.0, gamma=3)
            add("temperature 1, gamma 3, another drafter = gamma 0", made, plain)
    return {"comparisons": counts, "ties": ties(greedy_ones)}


def _greedy(draft: str | None) -> dict[str, GenerateOptions]:
    """Return what is compared with `generate`."""
    return {"adaptive" if draft else "default": {}, "gamma 8": {"gamma": 8}}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=DEMO_PAIR, help="directory or hub name; default: the demo pair's")
    parser.add_argument("--draft", help="directory or hub name; default: none, for the demo target its own")
    parser.add_argument("--workload", choices=(*WORKLOADS, TASKS), help="default: tasks; demo pair: mixed")
    parser.add_argument("--categories", default=",".join(CATEGORIES[:6]), help="of tasks; default: six")
    parser.add_argument("--prompts", type=int, help="default 50; of tasks: per category, 10")
    parser.add_argument("--tokens", type=int, default=128, help="upper bound per completion")
    parser.add_argument("--ignore-eos", action="store_true", help="continue after end-of-sequence tokens")
    parser.add_argument("--at-once", type=int, default=1, help="requests in flight; default 1")
    return parser


def main() -> None:
    """Command line of this module."""
    parser, console = _parser(), Console(width=120)
    options = parser.parse_args()
    is_demo = options.target == DEMO_PAIR
    draft = options.draft or (DEMO_PAIR if is_demo else None)
    options.draft = draft
    options.workload = options.workload or ("mixed" if is_demo else TASKS)
    rendered: list[dict[str, Any]] = []
    asked: Sequence[Prompt]
    if options.workload == TASKS:
        options.prompts = options.prompts or 10
        try:
            model = resolve_model(options.target, "target")
            asked, compared = chat_prompts(model, options.categories.split(","), options.prompts)
        except (ValueError, GammarayError) as error:
            parser.error(str(error))
        rendered = [compared]
    else:
        options.prompts = options.prompts or 50
        asked = prompts(options.workload, options.prompts)
    asks = Asks(tuple(asked), options.tokens, options.ignore_eos, options.at_once)
    found = run_or_exit(_run(options.target, draft, asks, console))
    counts = found["comparisons"] = rendered + found["comparisons"]
    console.print(comparison_table(counts))
    ties = found["ties"]
    console.print(
        f"gaps between the two largest logits of generate: noise {ties['noise']:.1e}, narrowest "
        f"{ties['narrowest_gap']:.1e}, {ties['within_noise']} tokens within the noise"
    )
    texts = [one if isinstance(one, str) else " ".join(map(str, one)) for one in asked]
    result = {
        "settings": settings_of(options),
        "workload_fingerprint": fingerprint(texts),
        **found,
    }
    print(f"written: {write_result('equivalence', result, options.out)}")
    sys.exit(any(one["different"] for one in counts))


if __name__ == "__main__":
    main()
