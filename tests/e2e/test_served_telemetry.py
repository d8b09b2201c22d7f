"""Metrics of a running cluster, which equal the API's summaries, and traces, which go on those of callers."""

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families

from gammaray import Client, Completion
from gammaray.telemetry import names as t
from gammaray.telemetry.catalog import CATALOG, Role
from orchestrator.launcher.preflight import free_ports
from tests.programs import PROGRAMS
from tests.support.cluster.cluster_helpers import Cluster, eventually, is_without_model, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle_afterwards"), pytest.mark.timeout(600)]

COUNTED = ("gammaray_requests", "gammaray_cycles", "gammaray_tokens")

ROOT = Path(__file__).parents[2]
TIMEOUT_S, SCRAPE_S = 60.0, 1.0
PROMPT = "def read_lines(path):"


def get_json(url: str, **params: str) -> Any:
    return httpx.get(url, params=params, timeout=10).json()


@dataclass
class Prometheus:
    url: str

    def query(self, query: str) -> list[dict[str, Any]]:
        answer = get_json(f"{self.url}/api/v1/query", query=query)
        assert answer["status"] == "success", answer
        return list(answer["data"]["result"])

    def number(self, query: str) -> float:
        """Return the one number that a query results in; NaN when there is none."""
        result = self.query(query)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else math.nan

    def wait_for(self, query: str, value: float) -> None:
        is_so = eventually(lambda: self.number(query) == value, TIMEOUT_S)
        assert is_so, f"{query}: {self.query(query)}, not {value}"

    def is_ready(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/-/ready", timeout=1).is_success
        return False


@contextmanager
def running_prometheus(http: str, directory: Path) -> Iterator[Prometheus]:
    binary = PROGRAMS["prometheus"].path
    assert binary is not None
    text = (ROOT / "docs" / "prometheus.yml").read_text().replace("http://127.0.0.1:8000", http)
    config = directory / "prometheus.yml"
    config.write_text(text.replace("scrape_interval: 5s", f"scrape_interval: {SCRAPE_S:g}s"))
    shutil.copy(ROOT / "docs" / "prometheus-rules.yml", directory)
    (port,) = free_ports("127.0.0.1", 1)
    command = [binary, f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        assert eventually(prometheus.is_ready, TIMEOUT_S), f"exit status {server.poll()}"
        yield prometheus
    finally:
        server.terminate()
        try:
            server.wait(10)
        finally:
            server.kill()


def scrape(cluster: Cluster) -> dict[str, dict[tuple, float]]:
    """Return every sample of each process, found as Prometheus finds it; those of one role are summed."""
    found: dict[str, dict[tuple, float]] = {}
    for target in get_json(f"{cluster.http}/metrics/targets"):
        (address,) = target["targets"]
        text = httpx.get(f"http://{address}/metrics", timeout=10).text
        samples = found.setdefault(target["labels"]["process"], {})
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, *sorted(sample.labels.items()))
                samples[key] = samples.get(key, 0.0) + sample.value
    return found


def orchestrator_at_rest(cluster: Cluster) -> dict[tuple, float]:
    """Return the orchestrator's samples once no request runs and the last one is counted.

    A client gets its last token before the orchestrator ends and counts the request.
    """

    def counted() -> dict[tuple, float]:
        samples = scrape(cluster)["orchestrator"]
        return {key: value for key, value in samples.items() if key[0].startswith(COUNTED)}

    def is_at_rest() -> bool:
        before = counted()
        time.sleep(0.3)
        return counted() == before and not before["gammaray_requests_active",]

    assert eventually(is_at_rest)
    return scrape(cluster)["orchestrator"]


def complete(cluster: Cluster, **options) -> Completion:
    with Client(cluster.grpc) as client:
        return client.complete(PROMPT, max_tokens=96, seed=1, temperature=0.7, **options)


def test_every_process_serves_every_metric_of_its_role(cluster):
    complete(cluster, gamma=4)
    found = scrape(cluster)
    assert found.keys() == {role.value for role in Role}
    for metric in CATALOG:
        for role, samples in found.items():
            has = {name for name, *_ in samples}
            assert (Role(role) in metric.roles) == bool(has & set(metric.samples)), f"{metric.name} of {role}"
    statuses = {process.role: process.metrics_address for process in cluster.status()}
    assert all(statuses[role] for role in found)


@pytest.mark.needs("prometheus")
def test_prometheus_answers_the_documented_queries_as_the_summary_does(cluster, tmp_path):
    undisturbed(lambda: complete(cluster, gamma=4), is_without_model)  # a drafter that was late is paused
    orchestrator_at_rest(cluster)
    with running_prometheus(cluster.http, tmp_path) as prometheus:
        prometheus.wait_for("count(gammaray_info)", 3)
        prometheus.wait_for("min(count_over_time(gammaray_info[1m])) >= bool 2", 1)
        before = prometheus.number("sum(gammaray_cycles_total)")
        ended = prometheus.number("sum(gammaray_requests_total)")
        completion = complete(cluster, gamma=4)
        summary = completion.summary
        prometheus.wait_for("sum(gammaray_cycles_total)", before + summary.cycles)
        prometheus.wait_for("sum(gammaray_requests_total)", ended + 1)
        prometheus.wait_for("sum(gammaray_requests_active)", 0)

        queries = json.loads((ROOT / "docs/metric_queries.json").read_text())

        def answer(name):
            return prometheus.number(queries[f"gammaray.{name}"]["query"])

        assert answer("spec_decode.num_tested_tokens") == pytest.approx(summary.alpha)
        assert answer("cycles") == pytest.approx(summary.tokens_per_cycle)
        assert answer("cycle.gamma") == pytest.approx(4, abs=0.5)
        assert answer("decode.time") == pytest.approx(summary.speedup_estimate)
        assert answer("requests") == 0.0
        for entry in queries.values():
            assert prometheus.query(entry["query"]), entry["query"]
        dashboard = json.loads((ROOT / "helm/gammaray/dashboards/gammaray.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                assert prometheus.query(target["expr"].replace("$__rate_interval", "1m")), target["expr"]
        alerts = get_json(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
        rules = [rule for group in alerts for rule in group["rules"]]
        assert len(rules) >= 9
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


TRACE_IDS, SPAN_ID = {"gRPC": 0x0AF7651916CD43DD8448EB211C80319C, "HTTP": 7}, 0xB7AD6B7169203331


def roots(spans, trace_id):
    return [one for one in spans if one.name == t.SPAN_GENERATE and one.trace_id == f"{trace_id:032x}"]


def is_whole(trace_id, number, spans):
    """Whether so many generations of a trace have come, and spans of a worker too."""
    services = {one.resource["service.name"] for one in spans if one.trace_id == f"{trace_id:032x}"}
    return len(roots(spans, trace_id)) == number and "gammaray-target" in services


def test_both_apis_continue_the_traces_of_their_callers(cluster, collector):
    _, receiver = collector
    with Client(cluster.grpc) as client:
        untraced = client.complete(PROMPT, max_tokens=8, seed=1)
        flags = trace.TraceFlags(1)
        context = trace.SpanContext(TRACE_IDS["gRPC"], SPAN_ID, is_remote=False, trace_flags=flags)
        with trace.use_span(trace.NonRecordingSpan(context)):
            client.complete(PROMPT, max_tokens=8, seed=1)
    headers = {"traceparent": f"00-{TRACE_IDS['HTTP']:032x}-{SPAN_ID:016x}-01"}
    with cluster.openai() as client:
        client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, n=2, extra_headers=headers)
    for name, number in (("gRPC", 1), ("HTTP", 2)):
        received = receiver.wait(partial(is_whole, TRACE_IDS[name], number), TIMEOUT_S)
        assert {root.parent_id for root in roots(received, TRACE_IDS[name])} == {f"{SPAN_ID:016x}"}
    assert untraced.session_id not in {span.attributes.get(t.SESSION_ID) for span in receiver.spans}
