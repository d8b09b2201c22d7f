"""What all tests of the HTTP API share."""

import pytest

from tests.support.surface_helpers import ScriptedBackend


@pytest.fixture
def backend():
    return ScriptedBackend()
