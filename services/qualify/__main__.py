"""`python -m services.qualify`: `gammaray qualify`, with its options."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
import torch

from gammaray.bench.prompts import own_prompts
from gammaray.bench.provenance import write_result
from gammaray.cli.commands.qualify import RESULT_OPTION
from gammaray.cli.options import read_prompts
from gammaray.cli.output import output_console
from gammaray.cli.settings import parse_settings
from gammaray.qualify.judgement import Fitness, judge
from gammaray.qualify.measured import PairFacts, QualifyTask
from gammaray.qualify.tables import print_pair, print_ranking
from services.process.program import run_program
from services.qualify.loop import Pair
from services.qualify.measure import make_asks, measure
from services.qualify.models import Candidate, Target, load_draft, load_head

EXIT_CODES = {Fitness.FIT: 0, Fitness.SLOWER: 4, Fitness.UNFIT: 5}


def conclude(task: QualifyTask, pairs: Sequence[PairFacts], out: Path | None) -> int:
    """Print the judgements on measured pairs, and write them to a file; return the exit status."""
    judgements = [judge(pair, task.min_speedup) for pair in pairs]
    console = output_console()
    for pair, judgement in zip(pairs, judgements, strict=True):
        print_pair(console, pair, judgement)
    if len(pairs) > 1:
        print_ranking(console, pairs, judgements)
    if out is not None:
        candidates = [
            {"draft": pair.draft.name, **asdict(judgement), "measured": asdict(pair)}
            for pair, judgement in zip(pairs, judgements, strict=True)
        ]
        result = {"settings": task.model_dump(mode="json"), "candidates": candidates}
        click.echo(f"written: {write_result('qualify', result, out)}")
    return min(EXIT_CODES[judgement.fitness] for judgement in judgements)


def _qualify() -> int:
    task, others = parse_settings(QualifyTask, "gammaray qualify", sys.argv[1:], [RESULT_OPTION])
    return conclude(task, list(_pairs(task)), others["out"])


def _pairs(task: QualifyTask) -> Iterator[PairFacts]:
    target = Target(task.target)
    loaders = [(name, load_draft) for name in task.draft] + [(name, load_head) for name in task.head]
    _report(f"loading the target {task.target}")
    target.load()
    for name, load in loaders:
        is_local = load is load_head
        _report(f"loading the {'head' if is_local else 'draft'} {name}")
        candidate = load(name, target)
        pair = PairFacts(target.facts, candidate.facts, is_local)
        if not (target.facts.refusal or candidate.facts.refusal):
            pair = _measured(task, target, candidate, pair)
        yield pair
        del candidate
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measured(task: QualifyTask, target: Target, candidate: Candidate, pair: PairFacts) -> PairFacts:
    if task.prompts:
        texts = read_prompts(Path(task.prompts), "--prompts")
    else:
        texts = [text for _, text in own_prompts(task.num_prompts)]
    prompts = target.encode(texts, chat=task.chat)
    asks = make_asks(task, prompts, target.eos_token_ids, target.facts.max_context)
    trials = measure(
        Pair(target.scheduler(candidate.head), candidate.scheduler),
        asks,
        task,
        lambda done: _report(f"measuring {candidate.facts.name}: {done}"),
    )
    return replace(pair, trials=trials, shared=candidate.share_of(prompts))


def _report(step: str) -> None:
    click.echo(step, err=True)


if __name__ == "__main__":
    sys.exit(run_program(_qualify))
