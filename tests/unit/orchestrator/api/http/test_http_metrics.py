"""Prometheus' targets, and vLLM's metrics at /metrics."""

from prometheus_client.parser import text_string_to_metric_families

from gammaray.types import ProcessStatus, SpeculationTotals
from orchestrator.api.http.server.app import targets, vllm_metrics
from tests.support.http_helpers import call
from tests.support.surface_helpers import ScriptedBackend


def orchestrator(pid, totals, per_position, *, running=0, waiting=0):
    return ProcessStatus(
        *("orchestrator", pid, "", "demo", True, running),
        num_queued=waiting,
        speculation_totals=totals,
        accepted_per_position=per_position,
    )


def samples(text):
    """Return the samples of a page by name and labels, and the type of each family."""
    families = list(text_string_to_metric_families(text))
    found = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
    return found, {family.name: family.type for family in families}


def test_vllm_metrics_are_sums_over_the_orchestrators():
    one = SpeculationTotals(drafts=3, draft_tokens=12, accepted_tokens=7, emitted_tokens=10)
    two = SpeculationTotals(drafts=1, draft_tokens=2, accepted_tokens=2, emitted_tokens=3)
    processes = [
        orchestrator(1, one, (3, 2, 1, 1), running=2, waiting=1),
        orchestrator(2, two, (1, 1), running=1),
        ProcessStatus("target", 3, "127.0.0.1:1", "demo", True, 9, num_queued=9),
    ]
    found, types = samples(vllm_metrics(processes).decode())
    labels = (("engine", "0"), ("model_name", "demo"))
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert found == {
        ("vllm:num_requests_running", labels): 3,
        ("vllm:num_requests_waiting", labels): 1,
        ("vllm:generation_tokens_total", labels): 13,
        ("vllm:spec_decode_num_drafts_total", labels): 4,
        ("vllm:spec_decode_num_draft_tokens_total", labels): 14,
        ("vllm:spec_decode_num_accepted_tokens_total", labels): 9,
        **{(per_position, (*labels, ("position", str(n)))): count for n, count in enumerate((4, 3, 1, 1))},
    }
    assert {kind for name, kind in types.items() if "spec_decode" in name} == {"counter"}


async def test_metrics_are_served_as_prometheus_takes_them():
    answer = await call(ScriptedBackend(), "GET", "/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found, _ = samples(answer.text)
    assert found["vllm:spec_decode_num_drafts_total", (("engine", "0"), ("model_name", "scripted"))] == 0


async def test_metrics_without_redis_are_unavailable():
    class WithoutRedis(ScriptedBackend):
        async def status(self):
            return [*await super().status(), ProcessStatus("redis", 0, "127.0.0.1:6379", "", False, 0)]

    answer = await call(WithoutRedis(), "GET", "/metrics")
    assert answer.status_code == 503
    assert "Redis" in answer.json()["error"]["message"]


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
