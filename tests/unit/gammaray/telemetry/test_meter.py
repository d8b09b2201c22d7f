"""Metrics: counted, exposed to Prometheus, pushed over OTLP."""

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gammaray.errors import InvalidArgumentError
from gammaray.telemetry import otlp_metrics as metric_push
from gammaray.telemetry.export import MetricsExport
from gammaray.telemetry.meter import Histogram, Meter
from gammaray.telemetry.prometheus import MetricsServer
from orchestrator.launcher.preflight import free_ports
from tests.support.metrics_helpers import receiving_metrics


def scrape(address):
    """Return the value of each sample, by its name and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def make_meter():
    meter = Meter()
    meter.counter("gammaray.cycle.fallbacks").value += 3
    meter.counter("gammaray.tokens", origin="accepted").value += 5
    meter.gauge("gammaray.requests.active", lambda: 7)
    durations = meter.histogram("gammaray.inter_token_latency")
    for seconds in (0.0004, 0.0005, 0.0031, 99.0):
        durations.observe(seconds)
    return meter


@pytest.fixture
def endpoint():
    server = MetricsServer(make_meter(), "127.0.0.1:0")
    yield server.address
    server.stop()


def test_histogram_bound_belongs_to_its_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 7.5)


@pytest.mark.parametrize(
    "add",
    [
        lambda meter: meter.counter("gammaray.inter_token_latency"),
        lambda meter: meter.counter("gammaray.tokens"),
        lambda meter: meter.counter("gammaray.tokens", source="x"),
        lambda meter: [meter.counter("gammaray.tokens", origin="bonus") for _ in range(2)],
    ],
    ids=["kind", "no label", "wrong label", "twice"],
)
def test_series_that_the_catalogue_does_not_know_are_refused(add):
    with pytest.raises(ValueError, match=r"gammaray\."):
        add(Meter())


def test_scrape_has_counters_gauges_and_cumulative_buckets(endpoint):
    samples = scrape(endpoint)
    assert samples["gammaray_cycle_fallbacks_total",] == 3
    assert samples["gammaray_tokens_total", ("origin", "accepted")] == 5
    assert samples["gammaray_requests_active",] == 7
    bucket = "gammaray_inter_token_latency_seconds_bucket"
    assert samples[bucket, ("le", "0.0005")] == 2
    assert samples[bucket, ("le", "0.004")] == 3
    assert samples[bucket, ("le", "2.5")] == 3
    assert samples[bucket, ("le", "+Inf")] == samples["gammaray_inter_token_latency_seconds_count",] == 4
    assert samples["gammaray_inter_token_latency_seconds_sum",] == pytest.approx(99.004)
    assert samples["process_resident_memory_bytes",] > 2**20


def test_port_range_gives_each_process_one_until_none_is_left():
    (port,) = free_ports("127.0.0.1", 1)
    first = MetricsServer(Meter(), f"127.0.0.1:{port}-{port}")
    try:
        assert first.address == f"127.0.0.1:{port}"
        with pytest.raises(InvalidArgumentError, match="metrics_listen"):
            MetricsServer(Meter(), f"127.0.0.1:{port}-{port}")
    finally:
        first.stop()
    MetricsServer(Meter(), f"127.0.0.1:{port}").stop()


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1:", "127.0.0.1:9-8", "127.0.0.1:70000", "x:1-2-3"])
def test_bad_address_is_named(listen):
    with pytest.raises(InvalidArgumentError, match="metrics_listen"):
        MetricsServer(Meter(), listen)


async def test_endpoint_on_all_interfaces_announces_a_reachable_address():
    export = MetricsExport(Meter(), role="draft", model="demo", listen="0.0.0.0:0")
    assert not export.address.startswith("0.0.0.0")
    await export.stop()


async def test_tasks_are_counted_from_any_thread():
    meter, never = Meter(), asyncio.Event()
    export = MetricsExport(meter, role="draft", model="demo", listen="")

    async def count():
        (value,) = next(series for metric, series in meter.read() if metric.name == "gammaray.tasks")
        assert value[0] == {"role": "draft"}
        return await asyncio.to_thread(value[1])

    before = await count()
    waiting = [asyncio.create_task(never.wait()) for _ in range(5)]
    assert await count() == before + 5
    never.set()
    await asyncio.gather(*waiting)
    assert await count() == before
    await export.stop()


async def test_nothing_listens_without_an_address():
    export = MetricsExport(Meter(), role="draft", model="demo", listen="")
    assert export.address == ""
    await export.stop()


@pytest.fixture
async def collector(monkeypatch):
    async with receiving_metrics() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
        yield receiver


async def test_push_sends_the_same_numbers_by_opentelemetry_names(collector):
    export = MetricsExport(make_meter(), role="draft", model="demo", listen="")
    await asyncio.wait_for(collector.came.wait(), 30)
    await export.stop()
    (resource,) = collector.requests[-1].resource_metrics
    attributes = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
    assert attributes["service.name"] == "gammaray-draft"
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    fallbacks = metrics["gammaray.cycle.fallbacks"]
    assert fallbacks.sum.is_monotonic
    assert fallbacks.unit == "{cycle}"
    assert fallbacks.sum.data_points[0].as_double == 3 or fallbacks.sum.data_points[0].as_int == 3
    assert metrics["gammaray.requests.active"].gauge.data_points[0].as_int == 7
    (point,) = metrics["gammaray.inter_token_latency"].histogram.data_points
    assert (point.count, point.sum) == (4, pytest.approx(99.004))
    assert list(point.bucket_counts)[:2] == [2, 0]
    assert len(point.bucket_counts) == len(point.explicit_bounds) + 1


async def test_push_sends_at_shutdown(collector, monkeypatch):
    monkeypatch.setattr(metric_push, "SHUTDOWN_TIMEOUT_S", 60.0)  # this machine may be busy
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "3600000")
    meter = make_meter()
    export = MetricsExport(meter, role="draft", model="demo", listen="")
    assert collector.requests == []
    await export.stop()
    assert len(collector.requests) == 1


@pytest.mark.parametrize("variables", [{"OTEL_METRICS_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
async def test_push_can_be_disabled_in_the_environment(collector, monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    export = MetricsExport(make_meter(), role="draft", model="demo", listen="")
    await export.stop()
    assert collector.requests == []


@pytest.mark.slow
async def test_push_without_a_receiver_does_not_delay_shutdown(monkeypatch):
    (port,) = free_ports("127.0.0.1", 1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    export = MetricsExport(make_meter(), role="draft", model="demo", listen="")
    await asyncio.wait_for(export.stop(), 60)


@pytest.mark.parametrize("interval", ["often", "0", "-5", "inf"])
async def test_bad_interval_is_named(monkeypatch, interval):
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    with pytest.raises(InvalidArgumentError, match="OTEL_METRIC_EXPORT_INTERVAL"):
        MetricsExport(make_meter(), role="draft", model="demo", listen="")
