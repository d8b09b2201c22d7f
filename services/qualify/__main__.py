"""`python -m services.qualify`: reads a QualifyTask as JSON from stdin and writes a JSON object per line.

{"doing": "..."}                 the current step
{"pair": {...}}                  a PairFacts, one per candidate, in order
"""

from __future__ import annotations

import gc
import sys

import torch

from gammaray.qualify.measured import PairFacts, QualifyTask
from services.process.json_lines import Report, serve_task
from services.qualify.loop import Pair
from services.qualify.measure import make_asks, measure
from services.qualify.models import Candidate, Target, load_draft, load_head


def main() -> int:
    """Measure and return the exit code."""
    return serve_task(_qualify)


def _qualify(given: str, report: Report) -> None:
    task = QualifyTask.model_validate_json(given)
    target = Target(task.target)
    loaders = [(name, load_draft) for name in task.drafts] + [(name, load_head) for name in task.heads]
    report("doing", f"loading the target {task.target}")
    target.load()
    for name, load in loaders:
        is_local = load is load_head
        report("doing", f"loading the {'head' if is_local else 'draft'} {name}")
        candidate = load(name, target)
        pair = PairFacts(target=target.facts, draft=candidate.facts, is_local=is_local)
        if not (target.facts.refusal or candidate.facts.refusal):
            pair = _measured(task, target, candidate, pair, report)
        report("pair", pair.model_dump())
        del candidate
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _measured(
    task: QualifyTask, target: Target, candidate: Candidate, pair: PairFacts, report: Report
) -> PairFacts:
    prompts = target.encode(task.prompts, chat=task.chat)
    asks = make_asks(task, prompts, target.eos_token_ids, target.facts.max_context)
    trials = measure(
        Pair(target.scheduler(candidate.head), candidate.scheduler),
        asks,
        task,
        lambda done: report("doing", f"measuring {candidate.facts.name}: {done}"),
    )
    return pair.model_copy(update={"trials": trials, "shared": candidate.share_of(prompts)})


if __name__ == "__main__":
    sys.exit(main())
