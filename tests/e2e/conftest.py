"""One cluster for all end-to-end tests: starting it is what takes the time."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from cluster_helpers import Cluster, running_cluster

from benchmarks.otlp_receiver import Receiver, receiving


@pytest.fixture(scope="session")
def collector() -> Iterator[tuple[str, Receiver]]:
    """Where the cluster's spans go, those of callers that are sampled themselves."""
    with receiving() as running:
        yield running


@pytest.fixture(scope="session")
def cluster(collector: tuple[str, Receiver]) -> Iterator[Cluster]:
    with ExitStack() as started:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector[0])
            environment.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
            environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
            running = started.enter_context(running_cluster())
        yield running


@pytest.fixture(scope="module")
def idle_afterwards(cluster: Cluster) -> Iterator[None]:
    """Whatever a module's tests did, no session may be left on orchestrator or workers."""
    yield
    cluster.wait_until_idle()
