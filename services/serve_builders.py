"""Builders of the workers' applications as a Serve configuration calls them.

Their `args` are those of `gammaray.effective.WorkerArguments`; what a worker takes of its node is said by the
configuration's `ray_actor_options`.
"""

from __future__ import annotations

from typing import Any

from gammaray.deploy.effective import WorkerArguments
from services.app import build_draft, build_target

__all__ = ["draft", "target"]


def draft(args: dict[str, Any]) -> Any:
    """Return the application of draft workers.

    Raises:
        pydantic.ValidationError: A bad argument or setting.
    """
    given = WorkerArguments(**args)
    return build_draft(given.settings, given.workers, scaling=given.scaling, one_per_node=True)


def target(args: dict[str, Any]) -> Any:
    """Return the application of target workers.

    Raises:
        pydantic.ValidationError: A bad argument or setting.
    """
    given = WorkerArguments(**args)
    return build_target(given.settings, given.workers, scaling=given.scaling, one_per_node=True)
