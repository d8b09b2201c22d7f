"""What all integration tests share."""

import pytest

from orchestrator.backoff import Patience


@pytest.fixture(autouse=True)
def _no_haste(monkeypatch):
    """A drafter is late at the deadline that a test sets, not when this machine stalls for half a second."""
    monkeypatch.setattr(Patience, "NUM_SAMPLES", 1_000_000)
