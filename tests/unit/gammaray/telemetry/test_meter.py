"""Metrics: counted, and exposed to Prometheus."""

import asyncio
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gammaray.errors import InvalidArgumentError
from gammaray.telemetry.meter import Meter
from gammaray.telemetry.prometheus import MetricsExport, MetricsServer
from orchestrator.launcher.preflight import free_ports


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


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_scrape_has_counters_gauges_and_cumulative_buckets(host):
    server = MetricsServer(make_meter(), f"{host}:0")
    try:
        assert server.address.startswith(f"{host}:")
        samples = scrape(server.address)
    finally:
        server.stop()
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


def test_bad_address_is_named():
    for listen in ("9464", "127.0.0.1:9-8", "127.0.0.1:70000", "x:1-2-3"):
        with pytest.raises(InvalidArgumentError, match="metrics_listen"):
            MetricsServer(Meter(), listen)


async def test_tasks_are_counted_from_any_thread():
    meter, never = Meter(), asyncio.Event()
    export = MetricsExport(meter, role="draft", model="demo", listen="0.0.0.0:0")
    assert not export.address.startswith("0.0.0.0"), "others cannot reach it there"

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
