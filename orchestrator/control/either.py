"""The adaptive controller of a session that two models can draft for: a draft worker, and a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gammaray.blocks import Shape
from gammaray.types import DrafterKind
from orchestrator.control.adaptive import AdaptiveGamma
from orchestrator.cycle.types import Candidates, Cycle


class EitherModel:
    """Gives each cycle to the model of which more tokens per second are expected.

    Each has a controller, with costs and acceptance of its own, which also compares it with the matches of
    look-ups and with plain decoding. A model of which no proposal was measured is tried first.
    """

    def __init__(self, controllers: Mapping[DrafterKind, AdaptiveGamma]) -> None:
        self._controllers = controllers

    def next_shape(self, candidates: Candidates) -> Shape:
        best, highest = None, (False, 0.0)
        for kind, controller in self._controllers.items():
            models = [kind] if kind in candidates.models else []
            shape = controller.next_shape(replace(candidates, models=models))
            rank = (controller.is_new and shape.drafter is kind and shape.depth > 0, controller.speed)
            if best is None or rank > highest:
                best, highest = shape, rank
        assert best is not None
        return best

    def observe(self, cycle: Cycle) -> None:
        drafter = cycle.shape.drafter
        is_drafted = cycle.gamma > 0 and drafter.is_model
        for kind, controller in self._controllers.items():
            controller.observe(cycle, by_other=is_drafted and drafter is not kind)
