"""Log-likelihoods of continuations as transformers computes them, to check what an evaluation got."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def worst_difference(model: Path, scored: Sequence[tuple[str, str, float, bool]]) -> tuple[float, bool]:
    """Compare scores with those of the model's own forward in float32.

    Args:
        model: Directory of the model.
        scored: Contexts (without spaces at their end), continuations, summed log-likelihoods of these, and
            whether each of their tokens was the most likely one.

    Returns:
        The largest difference of a sum, and whether all agree on what was most likely.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst, same = 0.0, True
    for context, continuation, likelihood, is_greedy in scored:
        # As lm-eval does: the two need not be the tokens of the whole text.
        before = tokenizer(context)["input_ids"]
        after = tokenizer(context + continuation)["input_ids"][len(before) :]
        start, whole = len(before), torch.tensor(before + after)
        log_probs = module(whole[None]).logits[0, start - 1 : -1].double().log_softmax(-1)
        own = log_probs.gather(1, whole[start:, None]).sum().item()
        worst = max(worst, abs(own - likelihood))
        same &= is_greedy == bool((log_probs.argmax(-1) == whole[start:]).all())
    return worst, same
