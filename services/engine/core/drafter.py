"""Loads drafters: ordinary and parallel draft models, drafters that share weights with a target, early exits.

A drafter is a causal model in Hugging Face's format. In addition to it:

- `pard_token` in its configuration marks a parallel draft model (PARD, arXiv 2504.18583): after this mask
  token it predicts the token that follows in its place. The tensor `pard_embedding` [1, hidden_size] may hold
  the mask's embedding; the id is then not used.
- `draft_vocab_size` in its configuration: `lm_head.weight` has that many rows, and row i stands for the
  target's token i + d2t[i], as in EAGLE-3 checkpoints (tensor `d2t`, int64, ids ascending).
- `model.embed_tokens.weight` may be absent: then it is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from gammaray.demo_pair import early_exit_layers
from gammaray.errors import InvalidArgumentError
from gammaray.gguf import is_gguf
from services.engine.core.checkpoint import quant_method
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import (
    LlamaModel,
    LoadedModel,
    check_config,
    load_config,
    load_model,
    loaded_model,
    torch_device,
    torch_dtype,
)
from services.engine.core.tensor_files import (
    EMBEDDING,
    check_shape,
    checkpoint_folder,
    read_tensor,
    target_tensor,
    tensor_names,
)

__all__ = ["NOT_DRAFTED", "DraftFormat", "load_drafter", "reduced_ids"]

NOT_DRAFTED = -1e9
"""Logit of a token that a reduced draft vocabulary lacks: probability 0, and finite, so that a request that
allows only such tokens still has a distribution."""

HEAD = "lm_head.weight"

# Tensors of a drafter that are no weights of its module; EAGLE-3's t2d follows from d2t.
_EXTRA = ("d2t", "t2d", "pard_embedding")


@dataclass(frozen=True)
class DraftFormat:
    """What a drafter has beyond an ordinary model; see the module.

    Attributes:
        vocab_size: Number of logits of a proposal: the target's token ids.
        mask_token: The mask's row of the input embedding, which may be `vocab_size`; None: no parallel draft.
        target_ids: int64 [rows of the head]: the target's token of each row; None: row i is token i.
    """

    vocab_size: int
    mask_token: int | None = None
    target_ids: Tensor | None = None

    def with_all_tokens(self, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] from those of the head; `NOT_DRAFTED` for tokens it lacks."""
        if self.target_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), NOT_DRAFTED)
        spread[:, self.target_ids] = logits
        return spread


def load_drafter(
    name: str, target: str, *, device: str = "auto", dtype: str = "auto"
) -> tuple[LoadedModel, DraftFormat]:
    """Load a drafter as an ordinary model, whose head may be smaller and its embedding larger.

    Args:
        name: Directory, hub name or GGUF file, or `early-exit:N`.
        target: The target's directory or hub name; "" if it is not known.
        device: As for `load_model`.
        dtype: As for `load_model`.

    Raises:
        NotFoundError: There is no such model.
        UnsupportedModelError: Its configuration rules it out, or its weights are damaged or incomplete.
        InvalidArgumentError: Unknown device or dtype; a GGUF file that cannot be read; or the drafter needs
            weights of the target, which is not known, has none in safetensors, or does not match.
    """
    if early_exit_layers(name, field="model") is not None:
        return _early_exit(name, target, device, dtype)
    config = load_config(name)
    vocab_size = int(config.get_text_config().vocab_size)
    folder = None if is_gguf(name) else checkpoint_folder(name)
    if folder is None or not _is_special(folder, config):
        loaded = load_model(name, device=device, dtype=dtype)
        mask_token = _mask_token(name, loaded.config, vocab_size)
        if mask_token is not None and target:
            # A mask that was added to the target's vocabulary is no token of the target.
            vocab_size = min(vocab_size, int(load_config(target).get_text_config().vocab_size))
        return loaded, DraftFormat(vocab_size, mask_token)
    check_config(name, config)
    if method := quant_method(name, config):
        raise UnsupportedModelError(
            name, f"its weights are quantised ({method}), which such drafters cannot be"
        )
    where = torch_device(device)
    module, draft = _assembled(name, folder, config, target, torch_dtype(dtype, where))
    return loaded_model(name, module, config, where), draft


def _early_exit(name: str, target: str, device: str, dtype: str) -> tuple[LoadedModel, DraftFormat]:
    if not target or is_gguf(target):
        raise InvalidArgumentError("target_model", target, f"a directory or hub name, with model {name}")
    config = load_config(target).get_text_config()
    num_layers = early_exit_layers(name, config.num_hidden_layers, field="model")
    loaded = load_model(target, device=device, dtype=dtype, num_layers=num_layers)
    return loaded, DraftFormat(config.vocab_size)


def _mask_token(name: str, config: PretrainedConfig, num_rows: int) -> int | None:
    mask_token = getattr(config, "pard_token", None)
    if mask_token is None:
        return None
    if not isinstance(mask_token, int) or not 0 <= mask_token < num_rows:
        raise UnsupportedModelError(name, f"its pard_token is {mask_token!r}, allowed: [0, {num_rows})")
    return mask_token


def _is_special(folder: Path, config: PretrainedConfig) -> bool:
    """Whether a directory is no model that transformers loads by itself."""
    if getattr(config, "draft_vocab_size", None) is not None:
        return True
    names = set(tensor_names(folder))
    return bool(names) and ("pard_embedding" in names or EMBEDDING not in names)


def _assembled(
    name: str, folder: Path, config: PretrainedConfig, target: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, DraftFormat]:
    """Return the module of a drafter, with the target's embedding where it shares that."""
    vocab_size = int(config.vocab_size)
    weights = {key: read_tensor(name, folder, key) for key in tensor_names(folder)}
    d2t, _, mask = (weights.pop(key, None) for key in _EXTRA)
    target_ids = reduced_ids(name, getattr(config, "draft_vocab_size", None), vocab_size, d2t)
    embedding = weights.pop(EMBEDDING, None)
    if embedding is None:
        embedding = target_tensor(name, target, [EMBEDDING.removeprefix("model.")], "embedding")
    check_shape(name, EMBEDDING, embedding, (vocab_size, config.hidden_size))
    with no_init_weights():
        module: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="eager"
        )
    if mask is None:
        mask_token = _mask_token(name, config, vocab_size)
    else:
        check_shape(name, "pard_embedding", mask, (1, config.hidden_size))
        embedding, mask_token = torch.cat([embedding.to(dtype), mask.to(dtype)]), vocab_size
    rows = nn.Embedding(len(embedding), config.hidden_size, _weight=embedding.to(dtype))
    module.set_input_embeddings(rows)
    head = cast(LlamaModel, module).get_output_embeddings()
    if HEAD not in weights:
        if target_ids is not None or not config.tie_word_embeddings:
            raise UnsupportedModelError(name, f"it lacks {HEAD}")
        head.weight = rows.weight
    elif target_ids is not None:
        head.weight = nn.Parameter(torch.empty(len(target_ids), config.hidden_size, dtype=dtype))
    _fill(name, module, weights)
    return module, DraftFormat(vocab_size, mask_token, target_ids)


def _fill(name: str, module: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy the stored weights into the module, whose embedding is there already.

    Raises:
        UnsupportedModelError: Weights are missing, of another shape, or of no use.
    """
    try:
        missing, unexpected = module.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # another shape
        raise UnsupportedModelError(name, f"its weights do not fit its configuration: {error}") from error
    missing = [key for key in missing if key != EMBEDDING and not (key == HEAD and HEAD not in weights)]
    if missing:
        raise UnsupportedModelError(name, f"it lacks {len(missing)} weights, such as {sorted(missing)[0]}")
    if unexpected:
        raise UnsupportedModelError(name, f"its weight {sorted(unexpected)[0]} has no place in the model")


def reduced_ids(name: str, count: int | None, vocab_size: int, d2t: Tensor | None) -> Tensor | None:
    """Return the target's token of each row of a drafter's head; None: row i is token i.

    Args:
        name: The drafter.
        count: Its `draft_vocab_size`, if it has one.
        vocab_size: Number of the target's token ids.
        d2t: int64 [count], how far each row's token lies above the row.

    Raises:
        UnsupportedModelError: The offsets are missing or give no ascending ids below `vocab_size`.
    """
    if count is None or (d2t is None and count == vocab_size):
        return None
    if d2t is None:
        raise UnsupportedModelError(name, "it has a draft_vocab_size, but no tensor d2t")
    check_shape(name, "d2t", d2t, (count,))
    ids = torch.arange(count) + d2t.long()
    if (ids.diff() <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise UnsupportedModelError(name, f"its d2t does not give ascending ids in [0, {vocab_size})")
    return ids
