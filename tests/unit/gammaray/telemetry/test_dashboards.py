"""The catalogue of metrics; its dashboard, alerts and pages are complete and about existing metrics."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from docs.make_metrics import QUERIES
from gammaray.telemetry.catalog import CATALOG, Kind, by_name

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
        assert by_name(metric.name) is metric


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


HEALTHY = {
    'gammaray_requests_total{outcome="length"}': "0+600x720",
    "gammaray_decode_time_seconds_total": "0+50x720",
    "gammaray_decode_plain_time_seconds_total": "0+100x720",
    'gammaray_time_to_first_token_seconds_bucket{le="0.5"}': "0+600x720",
    'gammaray_time_to_first_token_seconds_bucket{le="5"}': "0+600x720",
    'gammaray_time_to_first_token_seconds_bucket{le="+Inf"}': "0+600x720",
    'gammaray_inter_token_latency_seconds_bucket{le="0.1"}': "0+600x720",
    'gammaray_inter_token_latency_seconds_bucket{le="1"}': "0+600x720",
    'gammaray_inter_token_latency_seconds_bucket{le="+Inf"}': "0+600x720",
}
ILL = {
    "nothing": ({}, None),
    "errors": (
        {'gammaray_requests_total{outcome="unavailable"}': "0+30x720"},
        "GammarayErrorBudgetBurnsFast",
    ),
    "refused clients": ({'gammaray_requests_total{outcome="resource_exhausted"}': "0+300x720"}, None),
    "slower than plain": (
        {"gammaray_decode_plain_time_seconds_total": "0+40x720"},
        "GammaraySpeculationDoesNotPay",
    ),
    "slow first tokens": (
        {'gammaray_time_to_first_token_seconds_bucket{le="0.5"}': "0+60x720"},
        "GammarayFirstTokenSlow",
    ),
    "stalls": (
        {'gammaray_inter_token_latency_seconds_bucket{le="0.1"}': "0+500x720"},
        "GammarayStreamsStall",
    ),
}


@pytest.mark.needs("prometheus")
@pytest.mark.parametrize(("changes", "alert"), ILL.values(), ids=ILL)
def test_alert_fires_only_for_its_condition(tmp_path, changes, alert):
    series = [{"series": name, "values": values} for name, values in {**HEALTHY, **changes}.items()]
    text = RULES.read_text()
    names = re.findall(r"- alert: (\w+)", text)
    summaries = dict(zip(names, re.findall(r"summary: (.+)", text), strict=True))
    severities = dict(zip(names, re.findall(r"severity: (\w+)", text), strict=True))
    checks = [
        {
            "eval_time": "6h",
            "alertname": name,
            "exp_alerts": [
                {
                    "exp_labels": {"severity": severities[name]},
                    "exp_annotations": {"summary": summaries[name]},
                }
            ]
            if name == alert
            else [],
        }
        for name in names
        if not (alert == "GammarayErrorBudgetBurnsFast" and name == "GammarayErrorBudgetBurns")
    ]
    path = tmp_path / "test.json"
    test = {"interval": "30s", "input_series": series, "alert_rule_test": checks}
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [test]}))
    assert "SUCCESS" in promtool("test", "rules", str(path))
