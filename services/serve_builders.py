"""Builders of the workers' applications as a Serve configuration calls them: with the settings alone.

How many replicas there are and what each takes of its node is said by the configuration itself.
"""

from __future__ import annotations

from typing import Any

from services.app import build_draft, build_target

__all__ = ["draft", "target"]


def draft(args: dict[str, Any]) -> Any:
    """Return the application of draft workers; `args` are fields of DraftSettings.

    Raises:
        pydantic.ValidationError: A bad setting.
    """
    return build_draft(args)


def target(args: dict[str, Any]) -> Any:
    """Return the application of target workers; `args` are fields of TargetSettings.

    Raises:
        pydantic.ValidationError: A bad setting.
    """
    return build_target(args)
