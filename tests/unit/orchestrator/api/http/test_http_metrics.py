"""The processes that serve metrics, for Prometheus."""

from gammaray.types import ProcessStatus
from orchestrator.api.http.server.app import targets


def test_targets_are_the_processes_that_serve_metrics():
    processes = [
        ProcessStatus("orchestrator", 1, "", "demo", True, 0, metrics_address="10.0.0.1:9464"),
        ProcessStatus("target", 2, "10.0.0.2:50051", "demo", False, 0, metrics_address="10.0.0.2:9464"),
        ProcessStatus("draft", 3, "10.0.0.3:50051", "demo", True, 0),
        ProcessStatus("redis", 4, "10.0.0.4:6379", "", True, 0),
    ]
    assert targets(processes) == [
        {"targets": ["10.0.0.1:9464"], "labels": {"process": "orchestrator", "pid": "1"}},
        {"targets": ["10.0.0.2:9464"], "labels": {"process": "target", "pid": "2"}},
    ]
