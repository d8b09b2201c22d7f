"""OpenTelemetry from environment variables: setup, rejected values, and shutdown."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import gammaray
from gammaray.errors import InvalidArgumentError
from gammaray.telemetry.otel import Telemetry, exports_traces
from tests.support.otlp_receiver import receiving

ROOT = Path(gammaray.__file__).parents[1]
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
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        check=True,
        env={"PATH": ""},
    )
    assert result.stdout.strip() == "None None False"


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
