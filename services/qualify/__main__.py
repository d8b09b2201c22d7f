"""`python -m services.qualify`: reads a QualifyTask as JSON from stdin and writes a JSON object per line.

    {"doing": "..."}                 the current step
    {"pair": {...}}                  a PairFacts, one per candidate, in order
    {"error": {"type": ..., ...}}    the last line after a failure; the exit code is then 1

`gammaray qualify` starts it; when that process ends, this one ends at its next line (broken pipe).
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gammaray.config import DraftSettings
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.qualify.judgement import has_other_vocabulary, obstacles
from gammaray.qualify.measured import ModelFacts, Overlap, PairFacts, QualifyTask
from services.process.json_lines import described, open_answers, write_line
from services.qualify.loop import Pair, draft_scheduler, target_scheduler
from services.qualify.measure import make_asks, measure
from services.qualify.models import Loaded, Source, encode, eos_token_ids, find, load, load_local
from services.vocabulary.translation import Translation, load_translation

Tell = Callable[[str, Any], None]


def main() -> int:
    """Measure and return the exit code."""
    answers = open_answers()

    def tell(key: str, value: Any) -> None:
        write_line(answers, {key: value})

    try:
        _qualify(QualifyTask.model_validate_json(sys.stdin.read()), tell)
    except GammarayError as error:
        tell("error", described(error))
        return 1
    except torch.OutOfMemoryError as error:
        tell("error", {"type": "ResourceExhaustedError", "message": str(error).splitlines()[0]})
        return 1
    except (BrokenPipeError, KeyboardInterrupt):
        return 1
    return 0


def _qualify(task: QualifyTask, tell: Tell) -> None:
    tell("doing", "inspecting the models")
    source = find("target", task.target, task)
    drafts = [find("draft", name, task, source) for name in task.drafts]

    @functools.cache
    def target() -> Loaded:
        tell("doing", f"loading the target {source.name}")
        return load(source)

    for draft in drafts:
        if obstacles(source.facts, draft.facts):
            # The target is not needed; load the draft, which is small, to report its own obstacles.
            tell("pair", PairFacts(target=source.facts, draft=load(draft).facts).model_dump())
        else:
            tell("pair", _candidate(task, source, target(), draft, tell).model_dump())
            _free()
    for name in task.heads:
        tell("pair", _local_candidate(task, source, target(), name, tell).model_dump())
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _candidate(task: QualifyTask, source: Source, target: Loaded, draft: Source, tell: Tell) -> PairFacts:
    if target.engine is None:
        return PairFacts(target=target.facts, draft=draft.facts)
    tell("doing", f"loading the draft {draft.name}")
    loaded = load(draft)
    facts = PairFacts(target=target.facts, draft=loaded.facts)
    if loaded.engine is None or obstacles(target.facts, loaded.facts):
        return facts
    assert isinstance(loaded.settings, DraftSettings)
    translation, prompts = None, encode(source, task.prompts, chat=task.chat)
    if has_other_vocabulary(target.facts, loaded.facts):
        try:
            translation = load_translation(draft.path, loaded.engine.vocab_size, source.path)
        except InvalidArgumentError as error:
            refused = loaded.facts.model_copy(update={"refusal": str(error)})
            return PairFacts(target=target.facts, draft=refused)
        facts = facts.model_copy(update={"overlap": _overlap(translation, prompts)})
    pair = Pair(
        target_scheduler(target.engine, target.settings),
        draft_scheduler(loaded.engine, loaded.settings, translation),
    )
    return _measured(task, source, prompts, pair, facts, tell)


def _local_candidate(task: QualifyTask, source: Source, target: Loaded, name: str, tell: Tell) -> PairFacts:
    """Measure what drafts in the target worker."""
    unknown = ModelFacts(name=name)
    if target.engine is None:
        return PairFacts(target=target.facts, draft=unknown, is_local=True)
    tell("doing", f"loading the head {name}")
    found, drafter = load_local(name, source, target.engine)
    facts = PairFacts(target=target.facts, draft=found, is_local=True)
    if drafter is None:
        return facts
    pair = Pair(target_scheduler(target.engine, target.settings, drafter), None)
    try:
        return _measured(task, source, encode(source, task.prompts, chat=task.chat), pair, facts, tell)
    finally:
        target.engine.tap([])


def _measured(
    task: QualifyTask,
    source: Source,
    prompts: Sequence[Sequence[int]],
    pair: Pair,
    facts: PairFacts,
    tell: Tell,
) -> PairFacts:
    asks = make_asks(task, prompts, eos_token_ids(source), pair.target.engine.max_context)
    runs, equality, decisions = measure(
        pair, asks, task, lambda done: tell("doing", f"measuring {facts.draft.name}: {done}")
    )
    return facts.model_copy(update={"runs": runs, "equality": equality, "decisions": decisions})


def _overlap(translation: Translation, prompts: Sequence[Sequence[int]]) -> Overlap:
    shared, used = set(translation.common.target_ids), [token for prompt in prompts for token in prompt]
    return Overlap(
        shared=len(shared),
        prompt_share=sum(token in shared for token in used) / max(1, len(used)),
    )


if __name__ == "__main__":
    sys.exit(main())
