"""Measures a pair: each prompt is completed with every gamma, gamma 0 first, before the next prompt.

Two completions may differ only from a tie on, where the scores of their tokens differ by at most rounding.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gammaray.bench.measure import first_difference
from gammaray.errors import InvalidArgumentError
from gammaray.qualify.measured import Depth, QualifyTask, Trial
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.qualify.loop import Ask, MeasuredCycle, Pair, Text

_SESSION = "tie"
_CHUNK = 256
# Relative to the largest logit. Batches of other shapes sum in another order: the error is far below this in
# float32; in half precision it is a few times the distance of adjacent numbers.
_FLOAT32_TOLERANCE = 1e-5
_HALF_STEPS = 4.0
_WARM_UP_TOKENS = 3


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
    room = max_context - task.tokens
    if room < 1:
        raise InvalidArgumentError("tokens", task.tokens, f"below the target's context of {max_context}")
    if not all(prompts):
        raise InvalidArgumentError("prompts", "a prompt without tokens", "prompts with at least one token")
    return [
        Ask(tuple(prompt[-room:]), task.tokens, temperature, seed, eos_token_ids)
        for temperature in task.temperatures
        for seed, prompt in enumerate(prompts)
    ]


def measure(
    pair: Pair, asks: Sequence[Ask], task: QualifyTask, report: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Return the measurements by temperature.

    Args:
        pair: The models.
        asks: The completions, those of one temperature together.
        task: The gammas, and the network time.
        report: Called after each prompt with what was done.

    Raises:
        GammarayError: A model failed.
    """
    for gamma in (0, *task.gammas):  # the first forwards of each shape are slow
        pair.complete(replace(asks[0], max_tokens=_WARM_UP_TOKENS), gamma)
    trials = []
    for temperature, group in itertools.groupby(asks, key=lambda ask: ask.temperature):
        own, texts = list(group), {gamma: list[Text]() for gamma in (0, *task.gammas)}
        for number, ask in enumerate(own, 1):
            for gamma, made in texts.items():
                made.append(pair.complete(ask, gamma))
            report(f"temperature {temperature:g}: {number} of {len(own)} prompts")
        trials.append(_trial(pair, own, texts, 0.0 if pair.draft is None else task.rtt_ms))
    return tuple(trials)


def _trial(pair: Pair, asks: Sequence[Ask], texts: dict[int, list[Text]], network_ms: float) -> Trial:
    """Return the results of one temperature; `texts` are the completions of each ask by gamma."""
    plain, counts, divergence = texts.pop(0), Counter[str](), ""
    for gamma, made in texts.items():
        for number, (ask, expected, text) in enumerate(zip(asks, plain, made, strict=True), 1):
            counts["tokens"] += len(text.token_ids)
            index = first_difference(expected.token_ids, text.token_ids)
            if index is None:
                counts["equal"] += 1
            elif _diverges_at_tie(pair.target.engine, ask, expected, text, index):
                counts["ties"] += 1
            elif not divergence:
                divergence = (
                    f"with gamma {gamma} prompt {number} diverges from plain decoding at token {index + 1}"
                )
    cycles = {gamma: [cycle for text in made for cycle in text.cycles] for gamma, made in texts.items()}
    plain_times = [cycle.verify_ms for text in plain for cycle in text.cycles if not cycle.is_first]
    plain_ms = statistics.median(plain_times) if plain_times else None
    timed = {gamma: found for gamma in cycles if (found := _timed(cycles[gamma], gamma))}
    drafted = list(itertools.chain.from_iterable(cycles.values()))
    places = range(max((cycle.num_tested for cycle in drafted), default=0))
    steps = (statistics.median(one.draft_ms / one.draft_forwards for one in own) for own in timed.values())
    return Trial(
        temperature=asks[0].temperature,
        compared=len(asks) * len(texts),
        equal=counts["equal"],
        ties=counts["ties"],
        divergence=divergence,
        tokens=counts["tokens"],
        plain_ms=plain_ms,
        draft_step_ms=min(steps, default=None),
        tested=tuple(sum(cycle.num_tested > place for cycle in drafted) for place in places),
        accepted=tuple(sum(cycle.num_accepted > place for cycle in drafted) for place in places),
        depths=()
        if plain_ms is None
        else tuple(_depth(gamma, cycles[gamma], own, plain_ms, network_ms) for gamma, own in timed.items()),
    )


def _diverges_at_tie(engine: Engine, ask: Ask, expected: Text, text: Text, index: int) -> bool:
    if index >= min(len(expected.token_ids), len(text.token_ids)):
        return False
    tokens = expected.token_ids[index], text.token_ids[index]
    return is_tie(engine, ask, expected.token_ids[:index], tokens)


def _timed(cycles: Sequence[MeasuredCycle], gamma: int) -> list[MeasuredCycle]:
    """Return the cycles with a whole proposal that count for times: the first of a completion prefills."""
    return [one for one in cycles if one.num_drafted == gamma and not one.is_first and one.draft_forwards > 0]


def _depth(
    gamma: int,
    cycles: Sequence[MeasuredCycle],
    timed: Sequence[MeasuredCycle],
    plain_ms: float,
    network_ms: float,
) -> Depth:
    tokens = statistics.fmean(cycle.num_emitted for cycle in cycles if cycle.num_drafted == gamma)
    draft_ms = statistics.median(cycle.draft_ms for cycle in timed)
    verify_ms = statistics.median(cycle.verify_ms for cycle in timed)
    cycle_ms = draft_ms + verify_ms + network_ms
    return Depth(gamma, tokens, draft_ms, verify_ms, cycle_ms, tokens * plain_ms / cycle_ms)
