"""How a session's tokens are drawn where logits are computed."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GREEDY", "GumbelDraw"]


@dataclass(frozen=True, slots=True)
class GumbelDraw:
    """argmax(logits / temperature + gumbel), or argmax at temperature 0; the lowest id on ties.

    The noise is that of `services.engine.sampling.noise`, stream 0, at the drawn token's absolute position.
    """

    seed: int
    sample_index: int = 0
    temperature: float = 1.0


GREEDY = GumbelDraw(seed=0, temperature=0.0)
