"""Measures a pair: every gamma has its turn at each prompt before the next prompt, gamma 0 first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gammaray.errors import InvalidArgumentError
from gammaray.qualify.measured import Equality, QualifyTask, Run
from services.engine.engine import Engine
from services.qualify.loop import Ask, Cycle, Pair, Text
from services.qualify.ties import is_tie, parting

__all__ = ["make_asks", "measure"]

_WARM_UP_TOKENS = 24


@dataclass
class _Sum:
    """The cycles at one gamma and temperature."""

    cycles: list[Cycle] = field(default_factory=list)

    def run(self, temperature: float, gamma: int) -> Run:
        whole = [cycle for cycle in self.cycles if cycle.num_drafted == gamma]
        # The first cycle of a completion contains the prompt.
        timed = [cycle for cycle in whole if not cycle.is_first]
        drafted = [cycle for cycle in timed if cycle.draft_forwards > 0]
        return Run(
            temperature=temperature,
            gamma=gamma,
            cycles=len(self.cycles),
            emitted=sum(cycle.num_emitted for cycle in self.cycles),
            whole_cycles=len(whole),
            whole_emitted=sum(cycle.num_emitted for cycle in whole),
            tested=tuple(sum(cycle.num_tested > place for cycle in self.cycles) for place in range(gamma)),
            accepted=tuple(
                sum(cycle.num_accepted > place for cycle in self.cycles) for place in range(gamma)
            ),
            verify_ms=_median([cycle.verify_ms for cycle in timed]),
            draft_ms=_median([cycle.draft_ms for cycle in drafted]),
            draft_step_ms=_median([cycle.draft_ms / cycle.draft_forwards for cycle in drafted]),
        )


def make_asks(
    task: QualifyTask, prompts: Sequence[Sequence[int]], eos_token_ids: tuple[int, ...], max_context: int
) -> list[Ask]:
    """Return the completions of every temperature; a prompt that is too long loses its beginning.

    Args:
        task: What is measured.
        prompts: Their token ids.
        eos_token_ids: Tokens that end a completion.
        max_context: Of the target, in tokens.

    Raises:
        InvalidArgumentError: The tokens leave no room for a prompt, or a prompt has no tokens.
    """
    room = max_context - task.max_tokens
    if room < 1:
        raise InvalidArgumentError("tokens", task.max_tokens, f"below the target's context of {max_context}")
    if not all(prompts):
        raise InvalidArgumentError("prompts", "a prompt without tokens", "texts that have some")
    return [
        Ask(tuple(prompt[-room:]), task.max_tokens, temperature, seed, eos_token_ids)
        for temperature in task.temperatures
        for seed, prompt in enumerate(prompts)
    ]


def measure(
    pair: Pair, asks: Sequence[Ask], gammas: Sequence[int], tell: Callable[[int], None]
) -> tuple[tuple[Run, ...], tuple[Equality, ...]]:
    """Return what was measured, by temperature and gamma, and the comparisons with gamma 0.

    Args:
        pair: The models.
        asks: The completions.
        gammas: Depths above 0, in order.
        tell: Told after each of the `len(asks)` completions how many are done.

    Raises:
        GammarayError: A model failed.
    """
    for gamma in (0, *gammas):  # the first forwards of each shape are slow
        pair.complete(replace(asks[0], max_tokens=min(asks[0].max_tokens, _WARM_UP_TOKENS)), gamma)
    sums: dict[tuple[float, int], _Sum] = {}
    equality: dict[float, Equality] = {}
    for index, ask in enumerate(asks):
        texts = {gamma: pair.complete(ask, gamma) for gamma in (0, *gammas)}
        for gamma, text in texts.items():
            sums.setdefault((ask.temperature, gamma), _Sum()).cycles += text.cycles
        before = equality.get(
            ask.temperature, Equality(temperature=ask.temperature, compared=0, equal=0, ties=0)
        )
        equality[ask.temperature] = _compared(before, pair.target.engine, ask, texts)
        tell(index + 1)
    runs = tuple(done.run(temperature, gamma) for (temperature, gamma), done in sums.items())
    return runs, tuple(equality.values())


def _compared(before: Equality, engine: Engine, ask: Ask, texts: dict[int, Text]) -> Equality:
    """Add the comparisons of one ask's completions with that of gamma 0."""
    plain = texts[0].token_ids
    equal, ties, first = before.equal, before.ties, before.first
    for gamma, text in texts.items():
        if gamma == 0:
            continue
        index = parting(plain, text.token_ids)
        if index is None:
            equal += 1
            continue
        both = index < min(len(plain), len(text.token_ids))
        if both and is_tie(engine, ask, plain[:index], (plain[index], text.token_ids[index])):
            ties += 1
        elif not first:
            first = f"with gamma {gamma} prompt {ask.seed + 1} parts from plain decoding at token {index + 1}"
    return before.model_copy(
        update={"compared": before.compared + len(texts) - 1, "equal": equal, "ties": ties, "first": first}
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
