"""vLLM's own drafters in the target: which one a checkpoint is, and drafts that share the session's noise.

vLLM drafts with the argmax of a head's logits. Under coupled verification the target's token is the argmax of
its log-probabilities plus noise that is known here, and so is the draft's with `CoupledDrafts`. Drafts are
held until a block asks for them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from services.vllm.sampler import BlockSampler

__all__ = ["MAX_DRAFTS", "CoupledDrafts", "count_taps", "drafter_config"]

MAX_DRAFTS = 8
"""Most tokens that a drafter in the target proposes."""


def drafter_config(name: str) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for a drafter.

    Args:
        name: Directory or hub name of an EAGLE, EAGLE-3, Medusa or DFlash head or of a draft model; "mtp":
            the layers for this that the target itself has.

    Raises:
        InvalidArgumentError: Its configuration cannot be read.
    """
    if name == "mtp":
        return {"method": "mtp", "num_speculative_tokens": MAX_DRAFTS}
    stored = _stored(name)
    method, most = _method(stored), MAX_DRAFTS
    if method == "medusa":
        most = int(stored.get("num_heads") or stored.get("medusa_num_heads") or 1)
    elif method == "dflash":
        most = int(stored.get("block_size") or MAX_DRAFTS + 1) - 1
    return {"method": method, "model": name, "num_speculative_tokens": max(1, min(most, MAX_DRAFTS))}


def count_taps(config: Any) -> Any:
    """Add to an EAGLE-3 head's configuration how many of the target's layers it reads; vLLM assumes three."""
    layers = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    if layers:
        config.num_aux_hidden_states = len(layers)
    return config


class CoupledDrafts:
    """Draws a drafter's tokens with the noise of the sessions that they are for.

    Args:
        drafter: vLLM's proposer.
        sampler: Knows the sessions of the batch, and what the step emitted.
    """

    def __init__(self, drafter: Any, sampler: BlockSampler) -> None:
        self._drafter, self._sampler, self._depth = drafter, sampler, 0
        self._propose = drafter.propose

    def install(self) -> None:
        """Replace the drafter's argmax; Medusa's heads have their own."""
        self._drafter.propose = self._draft
        if hasattr(self._drafter, "_greedy_sample"):
            self._drafter._greedy_sample = self._sample

    def _draft(self, *args: Any, **kwargs: Any) -> Any:
        self._depth = 0
        if hasattr(self._drafter, "_greedy_sample"):
            return self._propose(*args, **kwargs)
        return self._draft_medusa(kwargs["target_hidden_states"])

    def _draft_medusa(self, hidden_states: Tensor) -> Tensor:
        heads = self._drafter.model.compute_logits(self._drafter.model(hidden_states))
        return torch.stack(
            [self._sampler.draft(logits, depth, 1) for depth, logits in enumerate(heads)], dim=1
        )

    def _sample(self, hidden_states: Tensor) -> Tensor:
        logits = self._drafter.model.compute_logits(hidden_states)
        # A parallel drafter gives all tokens of a request at once, in order.
        per_request = self._drafter.num_speculative_tokens if self._drafter.parallel_drafting else 1
        tokens = self._sampler.draft(logits, self._depth, per_request)
        self._depth += per_request
        return tokens


def _stored(name: str) -> dict[str, Any]:
    path = Path(name) / "config.json"
    if not path.is_file():
        found = try_to_load_from_cache(name, "config.json") if not Path(name).exists() else None
        if not isinstance(found, str):
            raise InvalidArgumentError("head", name, "a directory or a model of the hub's cache, or mtp")
        path = Path(found)
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("head", f"{name} ({error})", "a config.json that can be read") from error
    if not isinstance(stored, dict):
        raise InvalidArgumentError("head", name, "a config.json that is an object")
    return stored


def _method(stored: dict[str, Any]) -> str:
    kind = stored.get("speculators_model_type")
    if kind:
        return str(kind)
    names = " ".join(
        [str(stored.get("model_type", "")), *map(str, stored.get("architectures") or [])]
    ).lower()
    if "medusa" in names or "medusa_num_heads" in stored:
        return "medusa"
    if "dflash" in names or "dflash_config" in stored:
        return "dflash"
    if "eagle3" in names:
        return "eagle3"
    return "eagle" if "eagle" in names else "draft_model"
