"""Whether the captured steps compute what they should, checked on the device before anything is timed."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.pair import TINY, Pair, random_tokens
from services.engine.core.batch import GumbelDraw, SequenceInput
from services.engine.cuda.torch_kernels import TorchKernels
from services.engine.graph_engine import GraphEngine

__all__ = ["MAX_DIFFERENCE", "checked", "exactness", "invariance"]

MAX_DIFFERENCE = 1e-3
"""Of logits of some units in float32; a wrong slot, mask or head makes differences as large as they are."""

_TREE = (-1, -1, 0, 0, 1, 3)


def exactness(device: str) -> dict[str, Any]:
    """A tiny float32 model: the device's kernels against transformers' own forward and plain torch.

    Returns:
        Largest differences of logits, and whether tokens drawn by both kinds of kernels are the same.
    """
    pair = Pair.build(TINY, device, torch.float32, seed=3)
    engine, plain = pair.target(), GraphEngine.of(pair.model, name="torch", kernels=TorchKernels(pair.model))
    text = random_tokens(300, 1, TINY.vocab)
    with torch.no_grad():
        reference = pair.module(torch.tensor([text], device=device)).logits[0].float()
    steps = ((0, 260), (260, 261), (261, 270), (270, 300))
    chain = [
        engine.step([SequenceInput("a", start, text[start:end], end - start)])[0] for start, end in steps
    ]
    nodes = random_tokens(len(_TREE), 2, TINY.vocab)
    other = random_tokens(20, 4, TINY.vocab)
    feeds = [SequenceInput("a", 290, nodes, len(nodes), _TREE), SequenceInput("b", 0, other, 3)]
    plain.step([SequenceInput("a", 0, text[:290], 0)])
    pairs = zip(engine.step(feeds), plain.step(feeds), strict=True)
    gumbel_draws = [GumbelDraw(5), GumbelDraw(6, 1, 0.8)]
    again = [SequenceInput("a", 290, text[290:291], 1), SequenceInput("b", 20, [7], 1)]
    drafts = [one.draft(again, gumbel_draws, 6, num_guesses=4) for one in (engine, plain)]
    chains = [[[draft.token_id for draft in own] for own in one] for one in drafts]
    return {
        "chain_against_transformers": (torch.cat(chain) - reference).abs().max().item(),
        "tree_against_torch": max((one - two).abs().max().item() for one, two in pairs),
        "same_chains": chains[0] == chains[1],
        "kernels": type(engine.runner.kernels).__name__,
        "captured": engine.runner.kernels.capturable,
    }


def checked(found: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `exactness`.

    Raises:
        RuntimeError: The kernels do not compute what they should: their times would mean nothing.
    """
    differences = (found["chain_against_transformers"], found["tree_against_torch"])
    if not all(one <= MAX_DIFFERENCE for one in differences) or not found["same_chains"]:
        raise RuntimeError(
            f"not exact, so nothing is measured (logits may differ by {MAX_DIFFERENCE}): {found}"
        )
    return found


def invariance(target: GraphEngine, num_tokens: int) -> dict[str, Any]:
    """Whether a chain's logits are, bit for bit, those of decoding it token by token."""
    text = random_tokens(40 + num_tokens, 9, target.vocab_size)
    for name in ("alone", "chain"):
        target.step([SequenceInput(name, 0, text[:40], 0)])
    alone = torch.cat(
        [target.step([SequenceInput("alone", i, text[i : i + 1], 1)])[0] for i in range(40, len(text))]
    )
    chain = target.step([SequenceInput("chain", 40, text[40:], num_tokens)])[0]
    for name in ("alone", "chain"):
        target.release(name)
    same = (alone == chain).all(-1)
    return {
        "rows": num_tokens,
        "identical_rows": int(same.sum()),
        "largest_difference": (alone - chain).abs().max().item(),
        "same_argmax": int((alone.argmax(-1) == chain.argmax(-1)).sum()),
    }
