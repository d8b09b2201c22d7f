"""Measures a pair: prompts are completed with every gamma, gamma 0 first, until it is certain what pays.

Two completions may differ only from a tie on, where the scores of their tokens differ by at most rounding.
Whether a gamma pays is a hypothesis on the mean of its tokens per cycle, which are bounded: it is tested
sequentially, after every few cycles (`gammaray.maths.sequential`)."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gammaray.bench.measure import first_difference
from gammaray.errors import InvalidArgumentError
from gammaray.maths.sequential import evidence
from gammaray.qualify.measured import Depth, QualifyTask, Trial
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.qualify.loop import Ask, Completion, MeasuredCycle, Pair

_SESSION = "tie"
_CHUNK = 256
# Relative to the largest logit. Batches of other shapes sum in another order: the error is far below this in
# float32; in half precision it is a few times the distance of adjacent numbers.
_FLOAT32_TOLERANCE = 1e-5
_HALF_STEPS = 4.0
_WARM_UP_TOKENS = 3
_STRIDE = 4
_GROUP = 6
"""Prompts whose completions are open at once: each gamma of each needs a cache."""
_MIN_TIMED = 12
"""Cycles without a prefill from which a median time is taken for a decision."""


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
    pair: Pair, asks: Sequence[Ask], task: QualifyTask, report: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Return the measurements by temperature.

    Args:
        pair: The models.
        asks: The completions, those of one temperature together.
        task: The gammas, and when to stop.
        report: Called after each round with what was done.

    Raises:
        GammarayError: A model failed.
    """
    for gamma in (0, *task.gammas):  # the first forwards of each shape are slow
        completion = pair.start(asks[0])
        pair.advance(completion, gamma, _WARM_UP_TOKENS)
        pair.end(completion)
    by_temperature = itertools.groupby(asks, key=lambda ask: ask.temperature)
    return tuple(_Trial(pair, tuple(group), task, report).run() for _, group in by_temperature)


class _Times(NamedTuple):
    """Median times of the cycles with a whole proposal of one gamma, without the first of a completion."""

    draft_ms: float
    step_ms: float
    verify_ms: float


class _Trial:
    """The completions of one temperature.

    All gammas, 0 among them, advance by `_STRIDE` tokens on a prompt before the next prompt of the group has
    its turn, so that a disturbance of the machine is shared by all gammas. Each time that all had one,
    the gammas are tested. One that is certain not to pay rests. The trial is over when all do, or when one is
    certain to pay.
    """

    def __init__(
        self, pair: Pair, asks: Sequence[Ask], task: QualifyTask, report: Callable[[str], None]
    ) -> None:
        self._pair, self._asks, self._task, self._report = pair, asks, task, report
        self._cycles: dict[int, list[MeasuredCycle]] = {gamma: [] for gamma in (0, *task.gammas)}
        self._verdicts: dict[int, bool | None] = dict.fromkeys(task.gammas)
        self._compared = {"compared": 0, "equal": 0, "ties": 0, "tokens": 0}
        self._divergence = ""

    def run(self) -> Trial:
        for start in range(0, len(self._asks), _GROUP):
            group = self._asks[start : start + _GROUP]
            open_completions = [{gamma: self._pair.start(ask) for gamma in self._cycles} for ask in group]
            try:
                self._advance(start, open_completions)
                for ask, completions in zip(group, open_completions, strict=True):
                    self._compare(ask, completions)
            finally:
                for completions in open_completions:
                    for completion in completions.values():
                        self._pair.end(completion)
            if self._is_certain:
                break
        return self._result()

    def _advance(self, start: int, open_completions: Sequence[dict[int, Completion]]) -> None:
        for tokens in range(_STRIDE, self._task.max_tokens + _STRIDE, _STRIDE):
            for completions in open_completions:
                for gamma, completion in completions.items():
                    if self._verdicts.get(gamma) is not False:
                        self._cycles[gamma] += self._pair.advance(completion, gamma, tokens)
            done = start * self._task.max_tokens + len(open_completions) * min(tokens, self._task.max_tokens)
            self._decide()
            self._report_progress(done)
            if self._is_certain:
                return

    @property
    def _is_certain(self) -> bool:
        verdicts = self._verdicts.values()
        return True in verdicts or all(verdict is False for verdict in verdicts)

    @property
    def _plain_times(self) -> list[float]:
        return [cycle.verify_ms for cycle in self._cycles[0] if not cycle.is_first]

    def _whole(self, gamma: int) -> list[MeasuredCycle]:
        return [cycle for cycle in self._cycles[gamma] if cycle.num_drafted == gamma]

    def _times(self, gamma: int, least: int) -> _Times | None:
        """Return the times of a gamma; None with fewer than `least` cycles."""
        timed = [cycle for cycle in self._whole(gamma) if not cycle.is_first and cycle.draft_forwards > 0]
        if len(timed) < least:
            return None
        return _Times(
            statistics.median(cycle.draft_ms for cycle in timed),
            statistics.median(cycle.draft_ms / cycle.draft_forwards for cycle in timed),
            statistics.median(cycle.verify_ms for cycle in timed),
        )

    def _cycle_ms(self, times: _Times) -> float:
        network_ms = 0.0 if self._pair.draft is None else self._task.rtt_ms
        return times.draft_ms + times.verify_ms + network_ms

    def _decide(self) -> None:
        """Test each gamma with all its cycles so far."""
        plain = self._plain_times
        if self._task.error == 0.0 or len(plain) < _MIN_TIMED:
            return
        for gamma in self._verdicts:
            times = self._times(gamma, _MIN_TIMED)
            if times is None:
                continue
            needed = self._task.min_speedup * self._cycle_ms(times) / statistics.median(plain)
            emitted = [cycle.num_emitted for cycle in self._whole(gamma)]
            below, above = evidence(emitted, needed, 1, gamma + 1)
            # A wrong "does not pay" needs an error at the gamma that pays, a wrong "pays" one at any gamma.
            if below >= -math.log(self._task.error):
                self._verdicts[gamma] = False
            elif above >= math.log(len(self._verdicts) / self._task.error):
                self._verdicts[gamma] = True
            else:
                self._verdicts[gamma] = None

    def _report_progress(self, done: int) -> None:
        undecided = [str(gamma) for gamma, verdict in self._verdicts.items() if verdict is None]
        share = f"{done} of up to {len(self._asks) * self._task.max_tokens} tokens per gamma"
        rest = f", undecided: gamma {', '.join(undecided)}" if self._task.error and undecided else ""
        self._report(f"temperature {self._asks[0].temperature:g}: {share}{rest}")

    def _compare(self, ask: Ask, completions: dict[int, Completion]) -> None:
        """Add the comparisons of one ask's completions with that of gamma 0, as far as both were made."""
        counts = self._compared
        for gamma, completion in completions.items():
            if gamma == 0 or not completion.output:
                continue
            plain, text = tuple(completions[0].output), tuple(completion.output)
            if not completions[0].is_over:
                text = text[: len(plain)]
            if not completion.is_over:
                plain = plain[: len(text)]
            counts["compared"] += 1
            counts["tokens"] += len(text)
            index = first_difference(plain, text)
            if index is None:
                counts["equal"] += 1
                continue
            both = index < min(len(plain), len(text))
            if both and is_tie(self._pair.target.engine, ask, plain[:index], (plain[index], text[index])):
                counts["ties"] += 1
            elif not self._divergence:
                self._divergence = (
                    f"with gamma {gamma} prompt {ask.seed + 1} diverges from plain decoding "
                    f"at token {index + 1}"
                )

    def _result(self) -> Trial:
        plain_ms = statistics.median(self._plain_times) if self._plain_times else None
        found = {gamma: times for gamma in self._verdicts if (times := self._times(gamma, 1)) is not None}
        depths = []
        for gamma, times in found.items():
            if plain_ms is None:
                break
            tokens = statistics.fmean(cycle.num_emitted for cycle in self._whole(gamma))
            cycle_ms = self._cycle_ms(times)
            speedup = tokens * plain_ms / cycle_ms
            depths.append(
                Depth(
                    gamma=gamma,
                    tokens_per_cycle=tokens,
                    draft_ms=times.draft_ms,
                    verify_ms=times.verify_ms,
                    cycle_ms=cycle_ms,
                    speedup=speedup,
                )
            )
        drafted = [cycle for gamma in self._verdicts for cycle in self._cycles[gamma]]
        places = range(max((cycle.num_tested for cycle in drafted), default=0))
        return Trial(
            temperature=self._asks[0].temperature,
            **self._compared,
            divergence=self._divergence,
            plain_ms=plain_ms,
            draft_step_ms=min((times.step_ms for times in found.values()), default=None),
            tested=tuple(sum(cycle.num_tested > place for cycle in drafted) for place in places),
            accepted=tuple(sum(cycle.num_accepted > place for cycle in drafted) for place in places),
            depths=tuple(depths),
            pays=(True in self._verdicts.values()) if self._is_certain else None,
        )
