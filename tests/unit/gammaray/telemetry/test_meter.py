"""Metrics are counted and exposed to Prometheus; OpenTelemetry follows its environment variables."""

import asyncio
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.otlp_receiver import receiving
from gammaray.errors import InvalidArgumentError
from gammaray.telemetry.meter import Meter
from gammaray.telemetry.otel import Telemetry, exports_traces
from gammaray.telemetry.prometheus import MetricsExport
from orchestrator.launcher.preflight import free_ports
from tests.support.own_process import run_code


def export(meter, listen):
    return MetricsExport(meter, role="draft", model="demo", listen=listen)


def scrape(address):
    """Return the value of each sample, by its name and labels."""
    # [::1] refuses a first connection now and then, on a busy machine.
    with httpx.Client(transport=httpx.HTTPTransport(retries=4), timeout=10) as http:
        answer = http.get(f"http://{address}/metrics")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_scrape_has_counters_gauges_and_cumulative_buckets(host):
    meter = Meter()
    meter.counter("gammaray.cycle.fallbacks").value += 3
    meter.counter("gammaray.tokens", origin="accepted").value += 5
    meter.gauge("gammaray.requests.active", lambda: 7)
    durations = meter.histogram("gammaray.inter_token_latency")
    for seconds in (0.0004, 0.0005, 0.0031, 99.0):
        durations.observe(seconds)
    server = export(meter, f"{host}:0")
    try:
        assert server.address.startswith(f"{host}:")
        samples = await asyncio.to_thread(scrape, server.address)
    finally:
        await server.stop()
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


async def test_port_range_gives_each_process_one_until_none_is_left():
    (port,) = free_ports("127.0.0.1", 1)
    first = export(Meter(), f"127.0.0.1:{port}-{port}")
    try:
        assert first.address == f"127.0.0.1:{port}"
        with pytest.raises(InvalidArgumentError, match="metrics_listen"):
            export(Meter(), f"127.0.0.1:{port}-{port}")
    finally:
        await first.stop()
    await export(Meter(), f"127.0.0.1:{port}").stop()


async def test_bad_address_is_named():
    for listen in ("9464", "127.0.0.1:9-8", "127.0.0.1:70000", "x:1-2-3"):
        with pytest.raises(InvalidArgumentError, match="metrics_listen"):
            export(Meter(), listen)


async def test_tasks_are_counted_from_any_thread():
    meter, never = Meter(), asyncio.Event()
    exported = export(meter, "0.0.0.0:0")
    assert not exported.address.startswith("0.0.0.0"), "others cannot reach it there"

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
    await exported.stop()


ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in (ENDPOINT, "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "is_on"),
    [
        ({}, False),
        ({ENDPOINT: "http://127.0.0.1:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:4317"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({ENDPOINT: "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://127.0.0.1:4317", "OTEL_SDK_DISABLED": "true"}, False),
        ({ENDPOINT: "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True),
    ],
    ids=str,
)
def test_exports_traces_when_the_standard_variables_say_so(monkeypatch, environment, is_on):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert exports_traces() is is_on


@pytest.mark.parametrize(
    ("name", "value"), [("OTEL_TRACES_EXPORTER", "zipkin"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")]
)
def test_exports_rejects_unsupported_values(monkeypatch, name, value):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:4318")
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match=name):
        exports_traces()


def test_telemetry_without_variables_loads_no_sdk():
    script = (
        "import sys\nfrom gammaray.telemetry.otel import Telemetry\nimport gammaray.telemetry.names\n"
        "telemetry = Telemetry('draft')\n"
        "print(telemetry.tracer, telemetry.span_ids, 'opentelemetry.sdk' in sys.modules)"
    )
    assert run_code(script, env={"PATH": ""}).stdout.strip() == "None None False"


async def test_shutdown_flushes_queued_spans(monkeypatch):
    with receiving() as (endpoint, receiver):
        monkeypatch.setenv(ENDPOINT, endpoint)
        telemetry = Telemetry("draft")
        telemetry.tracer.start_span("last words").end()
        assert await telemetry.shutdown(timeout_s=10.0)
        assert [span.name for span in receiver.spans] == ["last words"]


@pytest.mark.slow
async def test_shutdown_with_a_dead_collector_keeps_its_deadline(monkeypatch):
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:1")
    telemetry = Telemetry("draft")
    telemetry.tracer.start_span("without exporter").end()
    start = time.monotonic()
    await telemetry.shutdown(timeout_s=0.5)
    assert time.monotonic() - start < 8.0, "the exporter's own would be 10 s and more"
