"""Whether two completions part at a tie: where the scores of their tokens differ by no more than rounding."""

from __future__ import annotations

import torch

from services.engine.engine import Engine, Feed
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.qualify.loop import Ask

__all__ = ["is_tie", "parting"]

_SESSION = "tie"
_CHUNK = 256
# Of the largest logit. Batches of other shapes sum in another order: far below this in float32, while in half
# precision two neighbouring numbers are this far apart up to the factor.
_FLOAT32_TOLERANCE = 1e-5
_HALF_STEPS = 4.0


def parting(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Return the first index at which two completions differ; None when they are the same."""
    if left == right:
        return None
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def is_tie(engine: Engine, ask: Ask, common: tuple[int, ...], tokens: tuple[int, int]) -> bool:
    """Return whether the target scores two tokens behind `common` alike, up to rounding.

    Args:
        engine: The target.
        ask: What was completed.
        common: Emitted tokens before the two.
        tokens: The two tokens.
    """
    context = [*ask.prompt, *common]
    logits = torch.empty(0)
    for start in range(0, len(context), _CHUNK):
        (logits,) = engine.step([Feed(_SESSION, start, context[start : start + _CHUNK], 1)])
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
