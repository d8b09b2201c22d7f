"""The general path: any supported transformers model, one packed forward with our attention inside."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.attention import attend
from services.engine.batch import Batch
from services.engine.model import LoadedModel
from services.engine.probe import ModelLayout, handling

__all__ = ["GeneralRunner"]


class GeneralRunner:
    """Runs steps through the transformers model itself."""

    def __init__(self, loaded: LoadedModel, layout: ModelLayout) -> None:
        self._module = loaded.module
        self._device = loaded.device
        self._layout = layout
        parameters = inspect.signature(loaded.module.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, vocab_size] in float32; writes the new keys and values."""
        rows = batch.logit_rows
        arguments: dict[str, Any] = {}
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.long, device=self._device)
        if self._keeps_rows and wanted is not None:
            arguments["logits_to_keep"] = wanted
        token_ids = torch.tensor([batch.token_ids], device=self._device)
        positions = torch.tensor([batch.positions], device=self._device)

        def handler(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            scaling: float | None,
            window: int | None,
            softcap: float | None,
            sinks: Tensor | None,
            extra: dict[str, Any],
        ) -> Tensor:
            layer = self._layout.layer_of[id(module)]
            return attend(batch, layer, query, key, value, scaling, window, softcap, sinks)

        with handling(handler):
            output = self._module(token_ids, position_ids=positions, use_cache=False, **arguments)
        logits = output.logits[0]
        if wanted is not None and not self._keeps_rows:
            logits = logits[wanted]
        return logits[:, : self._layout.vocab_size].float()
