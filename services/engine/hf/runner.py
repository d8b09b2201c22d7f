"""The general path: any supported transformers model, one packed forward with the engine's attention."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gammaray.errors import InvalidArgumentError
from services.engine.core.batch import Batch
from services.engine.core.model import LoadedModel
from services.engine.hf.attention import LayerInput, attend
from services.engine.hf.deterministic import ROW_MULTIPLE, FixedRows
from services.engine.hf.probe import ModelLayout, handling

__all__ = ["TransformersRunner"]


class TransformersRunner:
    """Runs steps through the transformers model itself.

    Args:
        loaded: The model, switched to the engine's attention.
        layout: Result of the probe.
        fixed_shapes: Results must not depend on the rest of the step; see `deterministic`.

    Attributes:
        tapped: Hidden states of the last forward's rows, [rows, taps, hidden_size]; None without taps.
    """

    def __init__(self, loaded: LoadedModel, layout: ModelLayout, *, fixed_shapes: bool = False) -> None:
        self._module = loaded.module
        self._device = loaded.device
        self._layout = layout
        self._fixed_shapes = fixed_shapes
        parameters = inspect.signature(loaded.module.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        self._taps: tuple[int, ...] = ()
        self._found: dict[int, Tensor] = {}
        self.tapped: Tensor | None = None

    def tap(self, layers: Sequence[int]) -> None:
        """Record these hidden states in every forward, see `Engine.tap`.

        Raises:
            InvalidArgumentError: The model's layers are not found.
        """
        if layers and self._stack is None:
            raise InvalidArgumentError("layers", list(layers), "none: the model's layers are not in one list")
        self._taps, self.tapped = tuple(layers), None

    @functools.cached_property
    def _stack(self) -> nn.ModuleList | None:
        """The list of the model's layers, each with its attention; None if there is no such list."""
        for stack in self._module.modules():
            if isinstance(stack, nn.ModuleList) and len(stack) == self._layout.num_layers:
                found = [{self._layout.layer_of.get(id(part)) for part in layer.modules()} for layer in stack]
                if all(number in numbers for number, numbers in enumerate(found)):
                    return stack
        return None

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Record what enters the tapped layers, and what leaves the last one."""
        stack, hooks, self._found = self._stack, [], {}
        if self._taps and stack is not None:
            for number in set(self._taps) & set(range(len(stack))):
                hooks.append(
                    stack[number].register_forward_pre_hook(self._entering(number), with_kwargs=True)
                )
            if len(stack) in self._taps:
                hooks.append(stack[-1].register_forward_hook(self._leaving))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, number: int) -> Callable[..., None]:
        def record(_module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
            self._found[number] = given[0] if given else named["hidden_states"]

        return record

    def _leaving(self, _module: nn.Module, _given: Any, made: Any) -> None:
        self._found[self._layout.num_layers] = made[0] if isinstance(made, tuple) else made

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [wanted rows, vocab_size] in float32; writes the new keys and values."""
        if self._fixed_shapes:
            return self._fixed_forward(batch)
        rows = batch.logit_rows
        arguments: dict[str, Any] = {}
        wanted = None if rows is None else torch.tensor(rows, dtype=torch.long, device=self._device)
        if self._keeps_rows and wanted is not None:
            arguments["logits_to_keep"] = wanted
        logits = self._run(batch, batch.token_ids, batch.positions, arguments)
        if wanted is not None and not self._keeps_rows:
            logits = logits[wanted]
        return logits

    def _fixed_forward(self, batch: Batch) -> Tensor:
        # Elementwise functions use different code for the remainder after whole vectors.
        fill = [0] * (-len(batch.token_ids) % ROW_MULTIPLE)
        with FixedRows():
            logits = self._run(batch, batch.token_ids + fill, batch.positions + fill, {})
        rows = batch.logit_rows
        return logits[: len(batch.token_ids)] if rows is None else logits[rows]

    def _run(
        self, batch: Batch, token_ids: list[int], positions: list[int], arguments: dict[str, Any]
    ) -> Tensor:
        def handler(module: nn.Module, given: LayerInput, _: dict[str, Any]) -> Tensor:
            layer = self._layout.layer_of[id(module)]
            return attend(batch, layer, given, fixed_shapes=self._fixed_shapes)

        with handling(handler), self._recording():
            output = self._module(
                torch.tensor([token_ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                use_cache=False,
                **arguments,
            )
        if self._taps:
            states = torch.stack([self._found[tap].view(len(token_ids), -1) for tap in self._taps], dim=1)
            self.tapped = states[: len(batch.token_ids)].clone()
        logits: Tensor = output.logits[0, :, : self._layout.vocab_size]
        return logits.float()
