"""Builds the orchestrator's application as a Serve configuration has it: from the settings alone."""

from __future__ import annotations

from typing import Any

from gammaray.config import OrchestratorSettings
from orchestrator.app import build

__all__ = ["orchestrator"]


def orchestrator(args: dict[str, Any]) -> Any:
    """Return the application of orchestrators; `args` are fields of OrchestratorSettings.

    Raises:
        pydantic.ValidationError: A bad setting: told now, where the replica would only tell its log.
    """
    OrchestratorSettings(**args)
    return build(args)
