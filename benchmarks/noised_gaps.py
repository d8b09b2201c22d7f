"""How nearly a coupled draw at temperature 1 was another token's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from services.engine.sampling.noise import Noise


class NoisedGaps:
    """The logits of `transformers` in float32, with gammaray's noise.

    Args:
        model: Directory or hub name.
    """

    def __init__(self, model: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def first_two(self, context: Sequence[int], seed: int) -> tuple[int, int, float]:
        """Return the two tokens with the largest noised logits after some tokens, and their difference."""
        logits = self._model(torch.tensor([list(context)])).logits[0, -1].double()
        noised = logits + Noise(seed, 0, len(logits)).gumbel(len(context), 1)[0]
        values, tokens = noised.topk(2)
        first, second = tokens.tolist()
        return first, second, float(values[0] - values[1])
