"""One cluster for all end-to-end tests: starting it is what takes the time."""

from collections.abc import Iterator

import pytest
from cluster_helpers import Cluster, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def idle_afterwards(cluster: Cluster) -> Iterator[None]:
    """Whatever a module's tests did, no session may be left on orchestrator or workers."""
    yield
    cluster.wait_until_idle()
