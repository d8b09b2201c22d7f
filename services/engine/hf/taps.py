"""Records the hidden states between the layers of a transformers model, by hooks on its modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from services.engine.core.batch import Taps
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import LoadedModel
from services.engine.hf.probe import ModelLayout


@dataclass(frozen=True)
class TapPoints:
    """The decoder layers of a model in order: first argument and first result of each are hidden states."""

    name: str
    layers: nn.ModuleList

    @contextmanager
    def recording(self, taps: Taps) -> Iterator[None]:
        """Record the states of one forward, whose rows may be more than those of the taps.

        UnsupportedModelError if the forward bypassed one of the modules, or its states have another shape.
        """

        def before(column: int, _: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            record(column, positional[0] if positional else named["hidden_states"])

        def after(column: int, _: nn.Module, __: Any, result: Any) -> None:
            record(column, result[0] if isinstance(result, tuple) else result)

        missing = set(range(len(taps.layers)))

        def record(column: int, state: Tensor) -> None:
            rows, _, size = taps.states.shape
            if state.ndim != 3 or state.shape[1] < rows or state.shape[2] != size:
                reason = f"hidden state {taps.layers[column]} has the shape {list(state.shape)}"
                raise UnsupportedModelError(self.name, reason)
            taps.states[:, column].copy_(state[0, :rows])
            missing.discard(column)

        with ExitStack() as hooks:
            for column, layer in enumerate(taps.layers):
                if layer == len(self.layers):
                    hook = self.layers[-1].register_forward_hook(partial(after, column))
                else:
                    entry = partial(before, column)
                    hook = self.layers[layer].register_forward_pre_hook(entry, with_kwargs=True)
                hooks.callback(hook.remove)
            yield
        if missing:
            bypassed = [taps.layers[column] for column in sorted(missing)]
            reason = f"its forward bypasses the modules of the hidden states {bypassed}"
            raise UnsupportedModelError(self.name, reason)


def find_tap_points(loaded: LoadedModel, layout: ModelLayout) -> TapPoints | str:
    """Return where a model's hidden states pass, or why that is not known.

    The layers are the list of modules of which each contains the attention of one layer, in order.
    """
    for layers in loaded.module.modules():
        if isinstance(layers, nn.ModuleList) and _attend_in_order(layers, layout):
            return TapPoints(loaded.name, layers)
    return f"the decoder layers of {loaded.name} are not a list of modules"


def _attend_in_order(layers: nn.ModuleList, layout: ModelLayout) -> bool:
    return len(layers) == layout.num_layers and all(
        any(layout.layer_of.get(id(module)) == index for module in layer.modules())
        for index, layer in enumerate(layers)
    )
