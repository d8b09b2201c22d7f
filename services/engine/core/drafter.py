"""Loads drafters: ordinary and parallel draft models, drafters that share weights with a target, early exits.

A drafter is a causal model in Hugging Face's format. In addition to it:

- `pard_token` in its configuration marks a parallel draft model (PARD, arXiv 2504.18583): after this mask
  token it predicts the token that follows in its place. The tensor `pard_embedding` [1, hidden_size] may hold
  the mask's embedding; the id is then not used.
- `draft_vocab_size` in its configuration: `lm_head.weight` has that many rows, and row i stands for the
  target's token i + d2t[i], as in EAGLE-3 checkpoints (tensor `d2t`, int64, ids ascending).
- The input embedding may be absent: then it is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from gammaray.demo_pair import early_exit_layers
from gammaray.errors import InvalidArgumentError
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import (
    LoadedModel,
    check_config,
    embeddings,
    load_config,
    load_model,
    loaded_model,
    torch_device,
    torch_dtype,
)
from services.engine.core.shapes import (
    check_token_map,
    check_weights,
    input_names,
    output_names,
    skeleton,
    stored_as,
)
from services.engine.core.tensor_files import checkpoint_folder, read_tensor, tensor_names

NOT_DRAFTED = -1e9
"""Logit of a token that a reduced draft vocabulary lacks: probability 0, and finite, so that a request that
allows only such tokens still has a distribution."""

# Tensors of a drafter that are no weights of its module; EAGLE-3's t2d follows from d2t.
_EXTRA = ("d2t", "t2d", "pard_embedding")


@dataclass(frozen=True)
class DraftFormat:
    """What a drafter has beyond an ordinary model; see the module."""

    vocab_size: int  # number of logits of a proposal: the target's token ids
    mask_token: int | None = None  # the mask's row of the embedding, maybe `vocab_size`; None: not parallel
    target_ids: Tensor | None = None  # int64 [rows of the head]: each row's token; None: row i is token i

    def with_all_tokens(self, logits: Tensor) -> Tensor:
        """Return logits [rows, vocab_size] from those of the head; `NOT_DRAFTED` for tokens it lacks."""
        if self.target_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), NOT_DRAFTED)
        spread[:, self.target_ids] = logits
        return spread


def load_drafter(name: str, target: str, *, device: str, dtype: str) -> tuple[LoadedModel, DraftFormat]:
    """Load a drafter as an ordinary model, whose head may be smaller and its embedding larger.

    The `name` may be `early-exit:N`, and the `target` "" if it is not known.

    Raises:
        NotFoundError: There is no such model.
        UnsupportedModelError: Its configuration rules it out, or its weights are damaged or incomplete.
        InvalidArgumentError: Unknown device or dtype, or the drafter needs weights of the target, which is
            not known, has none in safetensors, or does not match.
    """
    if early_exit_layers(name, field="model") is not None:
        return _early_exit(name, target, device, dtype)
    config = load_config(name)
    vocab_size = int(config.get_text_config().vocab_size)
    folder = checkpoint_folder(name)
    if folder is None or not _is_special(folder, config):
        loaded = load_model(name, device=device, dtype=dtype)
        mask_token = _mask_token(name, loaded.config, vocab_size)
        if mask_token is not None and target:
            # A mask that was added to the target's vocabulary is no token of the target.
            vocab_size = min(vocab_size, int(load_config(target).get_text_config().vocab_size))
        return loaded, DraftFormat(vocab_size, mask_token)
    check_config(name, config)
    where = torch_device(device)
    module, draft = _assembled(name, folder, config, target, torch_dtype(dtype, where))
    return loaded_model(name, module, config, where), draft


def is_ordinary(name: str) -> bool:
    """Whether a directory or hub name is that of a causal model that needs nothing of a target."""
    config, folder = load_config(name), checkpoint_folder(name)
    is_special = folder is not None and _is_special(folder, config)
    return getattr(config, "pard_token", None) is None and not is_special


def is_parallel(name: str) -> bool:
    """Whether a directory or hub name is that of a parallel draft model."""
    folder = checkpoint_folder(name)
    has_mask = getattr(load_config(name), "pard_token", None) is not None
    return has_mask or (folder is not None and "pard_embedding" in tensor_names(folder))


def _early_exit(name: str, target: str, device: str, dtype: str) -> tuple[LoadedModel, DraftFormat]:
    if not target:
        raise InvalidArgumentError("target", target, f"a directory or hub name, with model {name}")
    config = load_config(target).get_text_config()
    num_layers = early_exit_layers(name, config.num_hidden_layers, field="model")
    loaded = load_model(target, device=device, dtype=dtype, num_layers=num_layers)
    return loaded, DraftFormat(config.vocab_size)


def _mask_token(name: str, config: PretrainedConfig, num_rows: int) -> int | None:
    mask_token = getattr(config, "pard_token", None)
    if mask_token is None:
        return None
    if type(mask_token) is not int or not 0 <= mask_token < num_rows:
        raise UnsupportedModelError(name, f"its pard_token is {mask_token!r}, allowed: [0, {num_rows})")
    return mask_token


def _is_special(folder: Path, config: PretrainedConfig) -> bool:
    """Whether a directory is no model that transformers loads by itself."""
    if getattr(config, "draft_vocab_size", None) is not None:
        return True
    names, module = tensor_names(folder), skeleton(config)
    if not names or module is None:
        return False
    has_embedding = not set(stored_as(module, names).values()).isdisjoint(input_names(module))
    return "pard_embedding" in names or not has_embedding


def _assembled(
    name: str, folder: Path, config: PretrainedConfig, target: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, DraftFormat]:
    described = skeleton(config)
    if described is None:
        raise UnsupportedModelError(name, "transformers has no causal model of its configuration")
    vocab_size = int(config.get_text_config().vocab_size)
    expected: dict[str, Tensor] = described.state_dict()
    weights = _stored(name, folder, described)
    d2t, _, mask = (weights.pop(key, None) for key in _EXTRA)
    target_ids = check_token_map(name, getattr(config, "draft_vocab_size", None), vocab_size, d2t)
    input_name, head = input_names(described)[0], output_names(described)[0]
    shape = expected.pop(input_name).shape
    embedding = weights.pop(input_name, None)
    if embedding is None:
        embedding = target_tensor(name, target, "embedding")
    check_weights(name, {input_name: torch.empty(shape, device="meta")}, {input_name: embedding})
    has_head = head in weights
    if target_ids is not None:
        expected[head] = torch.empty(len(target_ids), expected[head].shape[1], device="meta")
    elif not has_head and config.tie_word_embeddings:
        del expected[head]
    check_weights(name, expected, weights)
    with no_init_weights():
        module: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation="eager"
        )
    if mask is None:
        mask_token = _mask_token(name, config, vocab_size)
    else:
        mask_shape = torch.empty(1, shape[1], device="meta")
        check_weights(name, {"pard_embedding": mask_shape}, {"pard_embedding": mask})
        embedding, mask_token = torch.cat([embedding.to(dtype), mask.to(dtype)]), vocab_size
    rows, output = embeddings(module)
    rows.weight, rows.num_embeddings = nn.Parameter(embedding.to(dtype)), len(embedding)
    if not has_head:
        output.weight = rows.weight
    elif target_ids is not None:
        output.weight = nn.Parameter(torch.empty(expected[head].shape, dtype=dtype))
    module.load_state_dict(weights, strict=False)  # all but the embedding, and a head that is tied to it
    return module, DraftFormat(vocab_size, mask_token, target_ids)


def _stored(name: str, folder: Path, module: PreTrainedModel) -> dict[str, Tensor]:
    names = stored_as(module, tensor_names(folder))
    if len(set(names.values())) < len(names):
        raise UnsupportedModelError(name, "its weights are stored in parts, which such drafters cannot be")
    return {parameter: read_tensor(name, folder, key) for key, parameter in names.items()}


def target_tensor(name: str, target: str, what: str) -> Tensor:
    """Return the "embedding" or "output matrix" (`what`) of a target, of which nothing else is read.

    InvalidArgumentError if the target is "", not known, or has no such tensor in safetensors.
    """
    allowed = f"a directory or hub name with safetensors, as {name} shares the target's {what}"
    if not target:
        raise InvalidArgumentError("target", target, allowed)
    folder, module = checkpoint_folder(target), skeleton(load_config(target))
    if folder is None or module is None:
        raise InvalidArgumentError("target", target, allowed)
    names_of = {"embedding": input_names, "output matrix": output_names}
    stored = {parameter: key for key, parameter in stored_as(module, tensor_names(folder)).items()}
    for parameter in names_of[what](module):
        if parameter in stored:
            return read_tensor(target, folder, stored[parameter])
    raise InvalidArgumentError("target", target, allowed)
