"""One cluster for most end-to-end tests: starting it is what takes the time."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from benchmarks.otlp_receiver import receiving
from tests.support.cluster.cluster_helpers import running_cluster

OWN_CLUSTERS = ("test_distributions", "test_lifecycle", "test_trust", "test_served_drafters", "test_smoke")
"""Files whose tests have clusters of their own, those that take longest first."""


class ByCluster(LoadScopeScheduling):
    """Gives all tests of the shared cluster to one process, and those of each other file to one."""

    def _split_scope(self, nodeid: str) -> str:
        name = Path(nodeid.partition("::")[0]).stem
        return name if name in OWN_CLUSTERS else "shared"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByCluster | None:
    """Schedule by cluster where the option is `--dist loadscope`."""
    return ByCluster(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests as they are scheduled: those of the shared cluster first."""
    order = ("shared", *OWN_CLUSTERS)
    items.sort(key=lambda item: order.index(item.path.stem) if item.path.stem in order else 0)


@pytest.fixture(scope="session")
def collector():
    """Where the cluster's spans go, those of callers that are sampled themselves."""
    with receiving() as running:
        yield running


@pytest.fixture(scope="session")
def cluster(collector):
    with ExitStack() as started:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector[0])
            environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
            environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
            running = started.enter_context(running_cluster())
        yield running


@pytest.fixture(scope="module")
def idle_afterwards(cluster):
    """Whatever a module's tests did, no session may be left on orchestrator or workers."""
    yield
    cluster.wait_until_idle()
