"""vLLM as an engine: the only entry to `services.vllm`, which an extra installs."""

from __future__ import annotations

from gammaray.config import DraftSettings, TargetSettings
from gammaray.engines import VLLM, EngineFacts
from gammaray.errors import InvalidArgumentError
from services.engines.interface import Served, target_model
from services.scheduling.planning import Limits


class VllmEngine:
    """Implements `services.engines.interface.Engine`; imports vLLM with the first model."""

    facts: EngineFacts = VLLM

    def refuse_draft(self, path: str, target: str, settings: DraftSettings) -> InvalidArgumentError | None:
        from services.vllm.loading import check_draft

        try:
            check_draft(path, target, settings)
        except InvalidArgumentError as error:
            return error
        return None

    def load_target(self, path: str, settings: TargetSettings, limits: Limits) -> Served:
        from services.vllm.loading import load_target

        loaded, scheduler = load_target(path, settings, limits)
        return Served(target_model(path, settings, self.facts, loaded), scheduler)

    def load_draft(self, path: str, target: str, settings: DraftSettings, limits: Limits) -> Served:
        from services.vllm.loading import load_draft

        return Served(*load_draft(path, target, settings, limits))
