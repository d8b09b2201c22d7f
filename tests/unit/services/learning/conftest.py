"""A tiny target, and versions that are looked for often."""

import pytest

from tests.support.learning_helpers import tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr("services.learning.versions.PERIOD_S", 0.02)
