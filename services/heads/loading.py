"""Loads heads from directories and the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from services.engine.core.drafter import target_tensor
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import load_config
from services.engine.core.shapes import check_rotary, check_token_map, check_weights
from services.engine.core.tensor_files import checkpoint_folder, read_tensor, tensor_names
from services.heads.eagle import EagleConfig, EagleHead
from services.heads.formats import LAYER, OFFICIAL_LAYER, is_head, read_config

__all__ = ["load_fusion", "load_head", "names_head"]

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
# The target's mask of the tokens that have a row follows from d2t; the verifier's weights are of training.
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def names_head(name: str) -> bool:
    """Return whether a directory or hub name is that of a head; other drafters are causal models."""
    folder = checkpoint_folder(name)
    return folder is not None and is_head(folder, tensor_names(folder))


def load_head(name: str, target: str) -> tuple[EagleHead, Tensor | None]:
    """Load a head for a target.

    Args:
        name: Directory or hub name.
        target: The target's directory or hub name.

    Returns:
        The head in float32, and the target's token of each row of its output, int64; None: row i is token i.

    Raises:
        UnsupportedModelError: The format, a flag, a size or a tensor is not supported, missing, damaged, or
            does not fit the target.
        InvalidArgumentError: The head shares a weight of the target which cannot be read.
    """
    folder, tensors, config = _described(name, target)
    weights = {_ours(key): read_tensor(name, folder, key) for key in tensors if key not in _UNUSED}
    count = config.num_outputs if "d2t" in weights or config.num_outputs != config.vocab_size else None
    target_ids = check_token_map(name, count, config.vocab_size, weights.pop("d2t", None))
    with torch.device("meta"):
        head = EagleHead(config)
    if _EMBEDDING not in weights:
        weights[_EMBEDDING] = target_tensor(name, target, "embedding")
    if _HEAD not in weights:
        if target_ids is not None:
            raise UnsupportedModelError(name, f"it lacks {_HEAD}")
        weights[_HEAD] = target_tensor(name, target, "output matrix")
    if not config.is_fused:
        weights["feature_norm.weight"] = target_tensor(name, target, "last norm")
    check_weights(name, head.state_dict(), weights)
    with torch.device("cpu"):
        rotary = type(head.rotary)(config.rope)  # its buffers are no weights
        check_rotary(name, rotary, config.head_dim)
    head.load_state_dict({key: tensor.float() for key, tensor in weights.items()}, assign=True)
    head.rotary = rotary
    return head.eval().requires_grad_(False), target_ids


def load_fusion(name: str, target: str) -> EagleHead:
    """Load the part of a head that makes features of the target's states: its `fuse`, and nothing else.

    Args:
        name: Directory or hub name.
        target: The target's directory or hub name.

    Returns:
        The head in float32, without the modules that `fuse` does not use.

    Raises:
        UnsupportedModelError: As for `load_head`, of the weights that are used.
        InvalidArgumentError: The target's last norm cannot be read, for a head that reads states through it.
    """
    folder, tensors, config = _described(name, target)
    with torch.device("meta"):
        head = EagleHead(config)
    unused = ["embed_tokens", "layers", "lm_head", "rotary", "norm" if config.is_fused else "fc"]
    for module in unused:
        delattr(head, module)
    expected = head.state_dict()
    weights = {key: read_tensor(name, folder, key) for key in tensors if key in expected}
    if not config.is_fused:
        weights["feature_norm.weight"] = target_tensor(name, target, "last norm")
    check_weights(name, expected, weights)
    head.load_state_dict({key: tensor.float() for key, tensor in weights.items()}, assign=True)
    return head.eval().requires_grad_(False)


def _described(name: str, target: str) -> tuple[Path, list[str], EagleConfig]:
    """Return the folder of a head, the names of its tensors, and its configuration."""
    folder = checkpoint_folder(name)
    tensors = [] if folder is None else tensor_names(folder)
    if folder is None or not tensors or not is_head(folder, tensors):
        raise UnsupportedModelError(name, "it is no head with its weights in safetensors")
    return folder, tensors, read_config(name, folder, tensors, load_config(target).get_text_config())


def _ours(key: str) -> str:
    if key.startswith(OFFICIAL_LAYER):
        return LAYER + key.removeprefix(OFFICIAL_LAYER)
    return key
