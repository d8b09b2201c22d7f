"""The orchestrator: cycles of many sessions, and the launcher of a cluster on one machine."""

import os
import sys

HIDES_TORCH = "ORCHESTRATOR_HIDES_TORCH"
"""Variable of the environment of a process that uses this package without torch."""


def hide_torch() -> None:
    """Let no import find torch from now on: `transformers` would import it, in seconds and 130 MB."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would advise to install torch


if HIDES_TORCH in os.environ:
    hide_torch()

# For this process and the replicas that it starts; see services/__init__.py.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
