"""vLLM's own drafters in the target: which one a checkpoint is, and drafts that share the session's noise.

vLLM drafts with the argmax of a head's logits. Under coupled verification the target's token is the argmax of
its log-probabilities plus noise that is known here, and so is the draft's with `CoupledDrafts`. Drafts are
kept until a block asks for them.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from torch import Tensor, nn

from gammaray.errors import InvalidArgumentError
from services.engine.core.tensor_files import checkpoint_folder, read_tensor, tensor_names
from services.heads.formats import kind_of_config
from services.process.adapters import stored_file
from services.vllm.sampler import BlockSampler

MAX_DRAFTS = 8
"""Most tokens that a drafter in the target proposes."""

TARGETS_OWN = "mtp"
"""Stands for the layers of the target itself that predict further tokens."""

_METHODS = ("eagle", "eagle3", "medusa", "dflash", "draft_model")


def drafter_config(name: str) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for a drafter.

    Args:
        name: Directory or hub name of an EAGLE, EAGLE-3, Medusa or DFlash head or of a draft model; "mtp":
            the layers for this that the target itself has.

    Raises:
        InvalidArgumentError: Its configuration cannot be read, or is of another kind.
        UnsupportedModelError: Its weights are damaged.
    """
    if name == TARGETS_OWN:
        return {"method": "mtp", "num_speculative_tokens": MAX_DRAFTS}
    stored, folder, most = _stored(name), checkpoint_folder(name), MAX_DRAFTS
    method = kind_of_config(stored, [] if folder is None else tensor_names(folder)) or "draft_model"
    if method not in _METHODS or "pard_token" in stored:
        kind = "a parallel draft model" if "pard_token" in stored else f"a drafter of kind {method}"
        allowed = f"{', '.join(_METHODS)} with vLLM as the engine; parallel draft models run on draft workers"
        raise InvalidArgumentError("head", f"{name}, {kind}", allowed)
    if stored.get("sample_from_anchor"):
        allowed = "false with vLLM as the engine, which draws no token from a block's first row"
        raise InvalidArgumentError("head.sample_from_anchor", True, allowed)
    if method == "medusa":
        most = int(stored.get("num_heads") or stored.get("medusa_num_heads") or 1)
    elif method == "dflash":
        most = int(stored.get("block_size") or MAX_DRAFTS + 1) - 1
    return {"method": method, "model": name, "num_speculative_tokens": max(1, min(most, MAX_DRAFTS))}


def complete_config(config: Any) -> Any:
    """Add to a drafter's configuration what vLLM would assume otherwise, and return it.

    An EAGLE-3 head may read another number of the target's layers than three. In its official format the ids
    name layers that the states leave if they begin with 1 (sglang#25454), else layers that the states enter,
    as vLLM takes all. In the format of `speculators` `sliding_window_non_causal` is for layers with sliding
    attention, of which vLLM makes a rule for all.
    """
    official = getattr(config, "eagle_config", None) or {}
    taps = official.get("eagle_aux_hidden_state_layer_ids")
    if taps and taps[0] == 1:
        config.eagle_aux_hidden_state_layer_ids = [layer + 1 for layer in taps]
    taps = getattr(config, "eagle_aux_hidden_state_layer_ids", taps)
    if taps:
        config.num_aux_hidden_states = len(taps)
    dflash = getattr(config, "dflash_config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if dflash and config.model_type == "speculators" and kinds == {"full_attention"}:
        config.dflash_config = {**dflash, "causal": False}
    return config


class CoupledDrafts:
    """Draws a drafter's tokens with the noise of the sessions, which the sampler of the step knows."""

    def __init__(self, drafter: Any, sampler: BlockSampler) -> None:
        self._drafter, self._sampler, self._depth = drafter, sampler, 0
        self._propose = drafter.propose
        self._hidden_size = drafter.vllm_config.model_config.get_hidden_size()

    def install(self) -> None:
        """Replace the drafter's argmax, of which Medusa's heads have their own, and layers with adapters."""
        _leave_adapters_out(self._drafter.model)
        self._drafter.propose = self._draft
        if hasattr(self._drafter, "_greedy_sample"):
            self._drafter._greedy_sample = self._sample

    def install_second(self) -> None:
        """Do the same in the V2 model runner; CUDA graphs of a drafter would draw the same noise again."""
        from vllm.config import CUDAGraphMode

        drafter, prepare = self._drafter, self._drafter.init_cudagraph_manager
        _leave_adapters_out(drafter.model)
        drafter.init_cudagraph_manager = lambda mode: prepare(CUDAGraphMode.NONE)
        drafter.propose, drafter.sample_draft = self._draft_second, self._sample_second

    def _draft_second(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._depth = 0
        if not kwargs.get("dummy_run"):
            states = torch.cat(aux_hidden_states, dim=-1) if aux_hidden_states else last_hidden_states
            self._sampler.note_states(states, input_batch.query_start_loc_np.tolist(), self._hidden_size)
        taken = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        return self._propose(*taken, *args, **kwargs)

    def _draft(self, *args: Any, **kwargs: Any) -> Any:
        self._depth = 0
        if (step := kwargs.get("common_attn_metadata")) is not None:  # Medusa has none, and does not learn
            first_rows = step.query_start_loc_cpu.tolist()
            self._sampler.note_states(kwargs["target_hidden_states"], first_rows, self._hidden_size)
        if hasattr(self._drafter, "_greedy_sample"):
            return self._propose(*args, **kwargs)
        states = self._drafter.model(kwargs["target_hidden_states"])
        heads = self._drafter.model.compute_logits(states)  # Medusa's
        return torch.stack([self._sampler.draft(logits, at, 1) for at, logits in enumerate(heads)], dim=1)

    def _sample(self, hidden_states: Tensor) -> Tensor:
        # A parallel drafter gives all tokens of a request at once, in order.
        per_request = self._drafter.num_speculative_tokens if self._drafter.parallel_drafting else 1
        return self._drawn(hidden_states, per_request)

    def _sample_second(self, hidden_states: Tensor, *args: Any) -> Tensor:
        is_parallel = self._drafter.speculative_config.parallel_drafting
        return self._drawn(hidden_states, self._drafter.num_speculative_steps if is_parallel else 1)

    def _drawn(self, hidden_states: Tensor, per_request: int) -> Tensor:
        logits = self._drafter.model.compute_logits(hidden_states)
        tokens = self._sampler.draft(logits, self._depth, per_request)
        self._depth += per_request
        return tokens


def _leave_adapters_out(model: nn.Module) -> None:
    """Let a drafter read the target's embedding and output matrix without adapters."""
    # vLLM's layers with adapters have one per row of the target's step; the drafter's passes have other rows.
    for module in model.modules():
        for name, layer in list(module.named_children()):
            if hasattr(layer, "base_layer"):
                setattr(module, name, layer.base_layer)


def replace_weights(model: Any, directory: str, config: Any) -> None:
    """Give vLLM's head the weights of a checked version, where compiled code and CUDA graphs read them.

    The head has the target's embedding. If the version was deleted since, the head stays as it is.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    folder = Path(directory)
    weights = [(key, read_tensor(directory, folder, key)) for key in tensor_names(folder)]
    # It warns of each module without weights, such as a rotary embedding.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    embedding = model.model.embed_tokens
    del model.model.embed_tokens
    try:
        with set_current_vllm_config(config):
            reload_weights(config, model, weights, None, is_checkpoint_format=True)
    finally:
        model.model.embed_tokens = embedding


def _stored(name: str) -> dict[str, Any]:
    try:
        stored = json.loads(stored_file(name, "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError, HFValidationError):
        allowed = "a directory or a model of the hub's cache, or mtp"
        raise InvalidArgumentError("head", name, allowed) from None
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("head", f"{name} ({error})", "a config.json that can be read") from error
    if not isinstance(stored, dict):
        raise InvalidArgumentError("head", name, "a config.json that is an object")
    return stored
