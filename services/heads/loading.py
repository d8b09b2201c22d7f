"""Loads heads from directories and the hub."""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.core.drafter import target_tensor
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_config
from services.engine.core.shapes import check_rotary, check_token_map, check_weights
from services.engine.core.tensor_files import checkpoint_folder, read_tensor, tensor_names
from services.heads.eagle import EagleHead
from services.heads.formats import LAYER, OFFICIAL_LAYER, is_head, read_config

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# The target's mask of the tokens that have a row follows from d2t; the verifier's weights are of training.
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def names_head(name: str) -> bool:
    """Return whether a directory or hub name is that of a head; other drafters are causal models."""
    folder = checkpoint_folder(name)
    return folder is not None and is_head(folder, tensor_names(folder))


def load_head(name: str, target: str, like: EagleHead | None = None) -> tuple[EagleHead, Tensor | None]:
    """Load a head in float32 and the target's token of each row of its output, int64, None: row i is token i.

    The head `like`, of this target, shares the embedding with this one if that has none. Nothing of the
    target is loaded then, which transformers cannot do while a thread computes.

    Raises:
        UnsupportedModelError: The format, a flag, a size or a tensor is not supported, missing, damaged, or
            does not fit the target.
        InvalidArgumentError: The head shares a weight of the target which cannot be read.
    """
    folder = checkpoint_folder(name)
    if folder is None:
        raise UnsupportedModelError(name, "it is no head with its weights in safetensors")
    tensors = tensor_names(folder)
    config = read_config(name, folder, tensors, load_config(target).get_text_config())
    if not tensors:
        raise UnsupportedModelError(name, "it has no weights in safetensors")
    weights = {_ours(key): read_tensor(name, folder, key) for key in tensors if key not in _UNUSED}
    vocab_size = config.layer.vocab_size
    count = config.num_outputs if "d2t" in weights or config.num_outputs != vocab_size else None
    target_ids = check_token_map(name, count, vocab_size, weights.pop("d2t", None))
    with torch.device("meta"):
        head = EagleHead(config)
    if _EMBEDDING not in weights:
        shared = None if like is None else like.embed_tokens.weight
        weights[_EMBEDDING] = target_tensor(name, target, "embedding") if shared is None else shared
    if _HEAD not in weights:
        if target_ids is not None:
            raise UnsupportedModelError(name, f"it lacks {_HEAD}")
        weights[_HEAD] = target_tensor(name, target, "output matrix")
    check_weights(name, head.state_dict(), weights)
    with torch.device("cpu"):
        rotary = type(head.rotary)(config.layer)  # its buffers are no weights
        check_rotary(name, rotary, config.head_dim)
    head.load_state_dict({key: tensor.float() for key, tensor in weights.items()}, assign=True)
    head.rotary = rotary
    return head.eval().requires_grad_(False), target_ids


def _ours(key: str) -> str:
    return LAYER + key.removeprefix(OFFICIAL_LAYER) if key.startswith(OFFICIAL_LAYER) else key
