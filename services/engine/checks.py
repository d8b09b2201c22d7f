"""Checks at the end of loading: compares the engine to the model's own forward, and to itself."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import LoadedModel
from services.engine.engine import Engine
from services.engine.hf.attention import ATTENTION_NAME

_NUM_TOKENS = 12
_FLOAT32_TOLERANCE = 1e-4
_QUANTISED_TOLERANCE = 1e-2  # where inputs are rounded, too; Qwen2.5-Coder-0.5B differs by 6e-4
_HALF_TOLERANCE = 0.05
_SESSION = "check"
# Enough to cross a block boundary of positions, also with trees.
_NUM_DETERMINISTIC_TOKENS = 80
_CHUNKS = (5, 1, 9, 4, 17, 2, 16)


def check_model(engine: Engine, loaded: LoadedModel, *, is_quantised: bool = False) -> None:
    """Feed a text in chunks with a rollback; UnsupportedModelError unless the logits are the model's own."""
    count = min(_NUM_TOKENS, engine.max_context)
    text = [(7 * i + 3) % engine.vocab_size for i in range(count)]
    # In bfloat16 eager attention rounds its scores: logits of Qwen2.5-Coder-1.5B then differ from those of
    # float32 by more than is allowed, ten times as much as without, and forty times as much as the kernel's.
    is_rounded = engine.runner.has_kernel and loaded.dtype != torch.float32
    reference = _plain_logits(loaded, text, "sdpa" if is_rounded else "eager")[:, : engine.vocab_size]
    cut = count // 2
    got = engine.step([SequenceInput(_SESSION, 0, text[:cut], cut)])
    wrong = [(token + 1) % engine.vocab_size for token in text[cut:-1]]
    if wrong:
        engine.step([SequenceInput(_SESSION, cut, wrong, 1)])
    got += engine.step([SequenceInput(_SESSION, cut, text[cut:], count - cut)])
    engine.release(_SESSION)
    difference = (torch.cat(got) - reference).abs()
    if loaded.dtype == torch.float32:
        # Large logits are rounded more coarsely.
        tolerance = _QUANTISED_TOLERANCE if is_quantised else _FLOAT32_TOLERANCE
        error, allowed = difference.max(), tolerance * reference.abs().max().clamp(min=1.0)
    else:
        # In half precision one different expert of a mixture changes single rows a lot, hence the mean.
        error, allowed = difference.mean(), _HALF_TOLERANCE * reference.abs().mean()
    if not error <= allowed:
        raise UnsupportedModelError(
            loaded.name,
            f"{loaded.config.model_type}: the engine's logits differ from the model's own by "
            f"{error.item():.3g}, allowed: {allowed.item():.3g}",
        )


def check_deterministic(engine: Engine) -> None:
    """Raise UnsupportedModelError if any bit of logits depends on chunks, on a batch or on trees."""
    count = min(_NUM_DETERMINISTIC_TOKENS, engine.max_context)
    text = [(11 * i * i + 5 * i + 1) % engine.vocab_size for i in range(count)]
    feeds = [SequenceInput(_SESSION, i, text[i : i + 1], 1) for i in range(count)]
    alone = torch.cat([engine.step([feed])[0] for feed in feeds])
    ways = {
        "as one chunk": engine.step([SequenceInput(_SESSION, 0, text, count)])[0],
        "in chunks with other sessions": _in_company(engine, text),
        "as nodes of a tree": _in_trees(engine, text),
    }
    for way, logits in ways.items():
        if not torch.equal(logits, alone):
            rows = (logits != alone).any(dim=1).sum().item()
            reason = f"not deterministic: {rows} of {count} rows differ when fed {way}"
            raise UnsupportedModelError(engine.model_name, reason)


def _in_company(engine: Engine, text: list[int]) -> Tensor:
    """Return the logits of chunks of many sizes, batched between rows of two other sessions."""
    logits, start, turn = [], 0, 0
    while start < len(text):
        chunk = text[start : start + _CHUNKS[turn % len(_CHUNKS)]]
        others = text[turn : turn + 1 + turn % 4]
        feeds = [
            SequenceInput("before", 0, others, len(others)),
            SequenceInput(_SESSION, start, chunk, len(chunk)),
            SequenceInput("after", 0, text[:turn] or text[:1], 1),
        ]
        logits.append(engine.step(feeds)[1])
        start, turn = start + len(chunk), turn + 1
    engine.release("before")
    engine.release("after")
    return torch.cat(logits)


def _in_trees(engine: Engine, text: list[int]) -> Tensor:
    """Return the logits of trees of two branches, of which the second is the text."""
    logits, start = [engine.step([SequenceInput(_SESSION, 0, text[:1], 1)])[0]], 1
    while start < len(text):
        branch = text[start : start + 7]
        size = len(branch)
        parents = [*range(-1, size - 1), -1, *range(size, 2 * size - 1)]
        feed = SequenceInput(_SESSION, start, [*reversed(branch), *branch], size, parents)
        logits.append(engine.step([feed])[0])
        engine.keep_path(_SESSION, start, range(size, 2 * size))
        start += size
    engine.release(_SESSION)
    return torch.cat(logits)


@torch.no_grad()
def _plain_logits(loaded: LoadedModel, text: list[int], attention: str) -> Tensor:
    loaded.module.set_attn_implementation(attention)
    token_ids = torch.tensor([text], device=loaded.device)
    logits: Tensor = loaded.module(token_ids, use_cache=False).logits[0].float()
    loaded.module.set_attn_implementation(ATTENTION_NAME)
    return logits
