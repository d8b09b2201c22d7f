"""The last check at load: the engine's logits against the model's own plain forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.engine.attention import ATTENTION_NAME
from services.engine.batch import Feed
from services.engine.errors import UnsupportedModelError
from services.engine.model import LoadedModel

if TYPE_CHECKING:
    from services.engine.engine import Engine

__all__ = ["check_model"]

_NUM_TOKENS = 12
_FLOAT32_TOLERANCE = 1e-4
_HALF_TOLERANCE = 0.05
_SESSION = "check"


def check_model(engine: Engine, loaded: LoadedModel) -> None:
    """Compare a short text fed in chunks, with a rollback, to the model's own forward.

    Raises:
        UnsupportedModelError: They differ by more than rounding.
    """
    count = min(_NUM_TOKENS, engine.max_context)
    text = [(7 * i + 3) % engine.vocab_size for i in range(count)]
    reference = _plain_logits(loaded, text)[:, : engine.vocab_size]
    cut = count // 2
    got = engine.step([Feed(_SESSION, 0, text[:cut], cut)])
    wrong = [(token + 1) % engine.vocab_size for token in text[cut:-1]]
    if wrong:
        engine.step([Feed(_SESSION, cut, wrong, 1)])
    got += engine.step([Feed(_SESSION, cut, text[cut:], count - cut)])
    engine.release(_SESSION)
    difference = (torch.cat(got) - reference).abs()
    if loaded.dtype == torch.float32:
        # Large logits are rounded more coarsely.
        error, allowed = difference.max(), _FLOAT32_TOLERANCE * reference.abs().max().clamp(min=1.0)
    else:
        # One flipped expert of a mixture moves single rows far in half precision, hence the mean.
        error, allowed = difference.mean(), _HALF_TOLERANCE * reference.abs().mean()
    if not error <= allowed:
        raise UnsupportedModelError(
            loaded.name,
            f"{loaded.config.model_type}: the engine's logits differ from the model's own by "
            f"{error.item():.3g}, allowed: {allowed.item():.3g}",
        )


@torch.no_grad()
def _plain_logits(loaded: LoadedModel, text: list[int]) -> Tensor:
    loaded.module.set_attn_implementation("eager")
    token_ids = torch.tensor([text], device=loaded.device)
    logits: Tensor = loaded.module(token_ids, use_cache=False).logits[0].float()
    loaded.module.set_attn_implementation(ATTENTION_NAME)
    return logits
