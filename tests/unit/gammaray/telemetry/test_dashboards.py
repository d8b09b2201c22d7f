"""The catalogue of metrics; its dashboard, alerts and pages are complete and about existing metrics."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from docs.make_metrics import QUERIES
from gammaray.telemetry.catalog import BY_NAME, CATALOG, Kind

ROOT = Path(__file__).parents[4]
DASHBOARD = json.loads((ROOT / "helm/gammaray/dashboards/gammaray.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = ROOT / "docs/prometheus-rules.yml"

OF_THE_PROCESS = {"process_resident_memory_bytes"}
SAMPLES = {sample: metric for metric in CATALOG for sample in metric.samples}
SELECTOR = re.compile(r"((?:gammaray|process)_\w+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"\bby \(([\w, ]+)\)")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
WITH_EVERY_SAMPLE = {"le", "instance", "job"}


def test_metrics_are_well_formed():
    for metric in CATALOG:
        assert re.fullmatch(r"gammaray(\.[a-z][a-z_]*)+", metric.name)
        assert metric.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", metric.unit), metric.name
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.roles, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert BY_NAME[metric.name] is metric


def labels_of(sample):
    return set(SAMPLES[sample].labels) if sample in SAMPLES else set()


def check_query(query):
    """Complain about samples and labels that the catalogue does not have."""
    used = SELECTOR.findall(query)
    assert used, query
    known = set(WITH_EVERY_SAMPLE)
    for sample, matchers in used:
        assert sample in SAMPLES or sample in OF_THE_PROCESS, f"{sample} in {query}"
        assert set(LABEL.findall(matchers)) <= labels_of(sample), query
        known |= labels_of(sample)
    for names in GROUPED.findall(query):
        assert set(names.replace(" ", "").split(",")) <= known, query


def promtool(*arguments):
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_panels_query_metrics_that_exist():
    for panel in PANELS:
        assert panel["targets"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
        for target in panel["targets"]:
            check_query(target["expr"])


def test_queries_are_about_their_metrics():
    assert QUERIES.keys() == {metric.name for metric in CATALOG}
    for metric in CATALOG:
        check_query(QUERIES[metric.name]["query"])
        assert any(sample in QUERIES[metric.name]["query"] for sample in metric.samples), metric.name


def test_alerts_are_about_metrics_that_exist():
    check_query(RULES.read_text())


@pytest.mark.needs("prometheus")
def test_promtool_takes_the_configuration_and_its_alerts():
    assert "rules found" in promtool("check", "config", str(ROOT / "docs/prometheus.yml"))


REQUESTS, FIRST, GAP = (
    "gammaray_requests_total{outcome=",
    "gammaray_time_to_first_token_seconds_bucket{le=",
    "gammaray_inter_token_latency_seconds_bucket{le=",
)
HEALTHY = {
    f'{REQUESTS}"length"}}': 600,
    "gammaray_decode_time_seconds_total": 50,
    "gammaray_decode_plain_time_seconds_total": 100,
    **{f'{FIRST}"{bound}"}}': 600 for bound in ("0.5", "5", "+Inf")},
    **{f'{GAP}"{bound}"}}': 600 for bound in ("0.1", "1", "+Inf")},
}
"""What is added to each series every 30 seconds."""

ILL = {
    "nothing": ({}, None),
    "errors": ({f'{REQUESTS}"unavailable"}}': 30}, "GammarayErrorBudgetBurnsFast"),
    "refused clients": ({f'{REQUESTS}"resource_exhausted"}}': 300}, None),
    "slower than plain": ({"gammaray_decode_plain_time_seconds_total": 40}, "GammaraySpeculationDoesNotPay"),
    "slow first tokens": ({f'{FIRST}"0.5"}}': 60}, "GammarayFirstTokenSlow"),
    "stalls": ({f'{GAP}"0.1"}}': 500}, "GammarayStreamsStall"),
}


@pytest.mark.needs("prometheus")
def test_alert_fires_only_for_its_condition(tmp_path):
    text = RULES.read_text()
    names, severities, summaries = (
        re.findall(pattern, text) for pattern in (r"- alert: (\w+)", r"severity: (\w+)", r"summary: (.+)")
    )
    tests = []
    for changes, alert in ILL.values():
        added = {**HEALTHY, **changes}.items()
        series = [{"series": name, "values": f"0+{number}x720"} for name, number in added]
        checks = []
        for name, severity, summary in zip(names, severities, summaries, strict=True):
            if alert == "GammarayErrorBudgetBurnsFast" and name == "GammarayErrorBudgetBurns":
                continue
            fires = {"exp_labels": {"severity": severity}, "exp_annotations": {"summary": summary}}
            expected = [fires] if name == alert else []
            checks.append({"eval_time": "6h", "alertname": name, "exp_alerts": expected})
        tests.append({"interval": "30s", "input_series": series, "alert_rule_test": checks})
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": tests}))
    assert "SUCCESS" in promtool("test", "rules", str(path))
