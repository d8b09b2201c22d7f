"""Faults of whole hosts and of their links while clients stream: no token changes, and no stream is lost."""

import pytest

from tests.hosts.cluster import running
from tests.hosts.faults import FAULTS, suffer

pytestmark = [pytest.mark.e2e, pytest.mark.kills, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.is_quick])
def test_streams_survive(cluster, name):
    outcome = suffer(cluster, FAULTS[name])
    assert outcome.completions
    assert outcome.wrong == []
    assert outcome.errors == []
