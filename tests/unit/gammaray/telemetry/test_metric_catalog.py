"""The catalogue of metrics: consistent names, and queries over existing samples."""

import re

import pytest

from docs.make_metrics import QUERIES
from gammaray.telemetry.catalog import CATALOG, Kind, by_name

SAMPLES = {sample for metric in CATALOG for sample in metric.samples}
SAMPLE_NAME = re.compile(r"\bgammaray_\w+")


def test_metrics_are_well_formed():
    for metric in CATALOG:
        assert re.fullmatch(r"gammaray(\.[a-z][a-z_]*)+", metric.name)
        assert metric.unit in ("s", "By", "1") or re.fullmatch(r"\{[a-z]+\}", metric.unit), metric.name
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.roles, metric.name
        assert metric.meaning.endswith("."), metric.name
        assert by_name(metric.name) is metric


def test_queries_are_about_their_metrics_and_over_samples_that_exist():
    assert QUERIES.keys() == {metric.name for metric in CATALOG}
    for metric in CATALOG:
        example = QUERIES[metric.name]
        assert example["answers"].endswith("."), metric.name
        used = set(SAMPLE_NAME.findall(example["query"]))
        assert used <= SAMPLES, metric.name
        assert used & set(metric.samples), metric.name


def test_names_are_unique_for_prometheus_too():
    assert len({metric.family for metric in CATALOG}) == len(CATALOG)
    assert len(SAMPLES) == sum(len(metric.samples) for metric in CATALOG)


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("gammaray.cycle.fallbacks", ["gammaray_cycle_fallbacks_total"]),
        ("gammaray.requests.active", ["gammaray_requests_active"]),
        ("gammaray.worker.cache.used", ["gammaray_worker_cache_used_bytes"]),
        (
            "gammaray.request.duration",
            [f"gammaray_request_duration_seconds_{part}" for part in ("bucket", "count", "sum")],
        ),
    ],
)
def test_samples_are_named_as_prometheus_names_them(name, samples):
    assert list(by_name(name).samples) == samples


@pytest.mark.parametrize("name", ["time_per_output_token", "inter_token_latency"])
def test_buckets_per_token_are_fine_below_10_ms(name):
    assert sum(bound <= 0.01 for bound in by_name(f"gammaray.{name}").buckets) >= 10
