"""Tests of several hosts are skipped where network namespaces cannot be made."""

import pytest

from tests.hosts.network import missing


@pytest.fixture(scope="session", autouse=True)
def possible():
    if reason := missing():
        pytest.skip(reason)
