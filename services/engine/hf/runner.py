"""The general path: any supported transformers model, one packed forward with the engine's attention."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from services.engine.core.batch import Batch, Runner
from services.engine.core.model import LoadedModel
from services.engine.hf.attention import LayerInput, attend
from services.engine.hf.probe import ModelLayout, handling
from services.engine.hf.taps import TapPoints, find_tap_points


class TransformersRunner(Runner):
    """Runs steps through the transformers model itself, switched to the engine's attention.

    If `flash`, None: on a GPU, prompts are attended for by a flash kernel where a layer allows one.
    """

    def __init__(self, loaded: LoadedModel, layout: ModelLayout, *, flash: bool | None = None) -> None:
        self._loaded, self._layout, self._device = loaded, layout, loaded.device
        self._flash = loaded.device.type != "cpu" if flash is None else flash
        self._keeps_rows = "logits_to_keep" in inspect.signature(loaded.module.forward).parameters

    @property
    def hidden_size(self) -> int:
        size: int = self._loaded.config.hidden_size
        return size

    def tap_obstacle(self) -> str:
        return self._tap_points if isinstance(self._tap_points, str) else ""

    def forward(self, batch: Batch) -> Tensor:
        rows, device, layout = batch.logit_rows, self._device, self._layout
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.long, device=device)
        arguments = {"logits_to_keep": wanted} if self._keeps_rows and wanted is not None else {}

        def handler(module: nn.Module, inputs: LayerInput, _: dict[str, Any]) -> Tensor:
            return attend(batch, layout.layer_of[id(module)], inputs, flash=self._flash)

        with handling(handler), self._recording(batch):
            output = self._loaded.module(
                torch.tensor([batch.token_ids], device=device),
                position_ids=torch.tensor([batch.positions], device=device),
                use_cache=False,
                **arguments,
            )
        logits: Tensor = output.logits[0, :, : layout.vocab_size].float()
        return logits if wanted is None or self._keeps_rows else logits[wanted]

    @cached_property
    def _tap_points(self) -> TapPoints | str:
        return find_tap_points(self._loaded, self._layout)

    def _recording(self, batch: Batch) -> AbstractContextManager[None]:
        if batch.taps is None:
            return nullcontext()
        assert isinstance(self._tap_points, TapPoints)
        return self._tap_points.recording(batch.taps)
