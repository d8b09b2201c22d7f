"""Measures a pair: each prompt is completed with every gamma before the next prompt, gamma 0 first.

Two completions may differ only from a tie on, where the scores of their tokens differ by at most rounding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from gammaray.errors import InvalidArgumentError
from gammaray.qualify.measured import Equality, QualifyTask, Run
from services.engine.engine import Engine, SequenceInput
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.qualify.loop import Ask, MeasuredCycle, Pair, Text

__all__ = [
    "is_tie",
    "make_asks",
    "measure",
    "parting",
]

_SESSION = "tie"
_CHUNK = 256
# Relative to the largest logit. Batches of other shapes sum in another order: the error is far below this in
# float32; in half precision it is a few times the distance of adjacent numbers.
_FLOAT32_TOLERANCE = 1e-5
_HALF_STEPS = 4.0


def parting(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return the first index at which two completions differ; None when they are the same."""
    if left == right:
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_tie(engine: Engine, ask: Ask, common: tuple[int, ...], tokens: tuple[int, int]) -> bool:
    """Return whether the target's scores of two tokens after `common` are equal up to rounding.

    Args:
        engine: The target.
        ask: The completion.
        common: Emitted tokens before the two.
        tokens: The two tokens.
    """
    context = [*ask.prompt, *common]
    logits = torch.empty(0)
    for start in range(0, len(context), _CHUNK):
        (logits,) = engine.step([SequenceInput(_SESSION, start, context[start : start + _CHUNK], 1)])
    engine.release(_SESSION)
    largest = logits.abs().max().item()
    scores, scale = logits[0].double(), 1.0
    if ask.temperature > 0:
        noise = Noise(ask.seed, 0, engine.vocab_size, device=engine.device)
        log_probs = processed_log_probs(logits, ask.params)
        scores, scale = log_probs[0] + noise.gumbel(len(context), 1)[0], 1.0 / ask.temperature
    gap = abs((scores[tokens[0]] - scores[tokens[1]]).item())
    is_float32 = engine.dtype == torch.float32
    relative = _FLOAT32_TOLERANCE if is_float32 else _HALF_STEPS * torch.finfo(engine.dtype).eps
    return gap <= relative * max(1.0, largest) * scale


_WARM_UP_TOKENS = 24


@dataclass
class _Sum:
    """The cycles at one gamma and temperature."""

    cycles: list[MeasuredCycle] = field(default_factory=list)

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
    """Return the completions of every temperature; a prompt that is too long is cut at its beginning.

    Args:
        task: The measurement.
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
        raise InvalidArgumentError("prompts", "a prompt without tokens", "prompts with at least one token")
    return [
        Ask(tuple(prompt[-room:]), task.max_tokens, temperature, seed, eos_token_ids)
        for temperature in task.temperatures
        for seed, prompt in enumerate(prompts)
    ]


def measure(
    pair: Pair, asks: Sequence[Ask], gammas: Sequence[int], tell: Callable[[int], None]
) -> tuple[tuple[Run, ...], tuple[Equality, ...]]:
    """Return the measurements by temperature and gamma, and the comparisons with gamma 0.

    Args:
        pair: The models.
        asks: The completions.
        gammas: Depths above 0, in order.
        tell: Called with the number of finished completions after each of the `len(asks)`.

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
            first = (
                f"with gamma {gamma} prompt {ask.seed + 1} diverges from plain decoding at token {index + 1}"
            )
    return before.model_copy(
        update={"compared": before.compared + len(texts) - 1, "equal": equal, "ties": ties, "first": first}
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
