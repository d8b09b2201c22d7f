"""What tests need of llguidance: gammaray runs with 1.7 too, which vLLM has."""

from __future__ import annotations

from importlib.metadata import version

import pytest

since_1_9 = pytest.mark.skipif(
    tuple(map(int, version("llguidance").split(".")[:2])) < (1, 9),
    reason="llguidance 1.7 has no escapes of printable characters and no `~ 2..3`",
)
