"""Builds the orchestrator's application as a Serve configuration has it: from its arguments alone."""

from __future__ import annotations

from typing import Any

from gammaray.config import OrchestratorSettings
from gammaray.deploy.effective import OrchestratorArguments
from orchestrator.app import build

__all__ = ["orchestrator"]


def orchestrator(args: dict[str, Any]) -> Any:
    """Return the application of orchestrators.

    Raises:
        pydantic.ValidationError: A bad argument or setting.
    """
    given = OrchestratorArguments(**args)
    OrchestratorSettings(**given.settings)  # told now, where a replica would only tell its log
    return build(given.settings, given.replicas, given.scaling)
