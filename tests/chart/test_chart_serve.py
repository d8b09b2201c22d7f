"""The Serve configuration of the chart: equal to that of `gammaray up`, and valid by Serve's own schema."""

import importlib

import pytest
import yaml

from gammaray.config import OrchestratorSettings, PoolSize
from gammaray.deploy.serve_config import GRPC_SERVICERS
from tests.support.chart.chart_helpers import (
    CHART,
    EVERYTHING,
    ROOT,
    VARIANTS,
    application,
    container,
    environment,
    groups,
    render,
    serve_config,
)
from tests.support.serve_helpers import schema_of

SERVE = CHART / "files" / "serve.yaml"
variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS)


def settings(role, values=None):
    return application(role, values)["args"]["settings"]


@variants
def test_builders_accept_the_configuration_of_the_chart(values):
    models = {"target": "demo", "draft": "demo", **values.get("models", {})}
    for entry in serve_config(values)["applications"]:
        role = entry["name"].removeprefix("gammaray-")
        assert entry["args"]["settings"]["model"] == models.get(role, models["target"])
        module, _, function = entry["import_path"].partition(":")
        built = schema_of(getattr(importlib.import_module(module), function)(entry["args"]))
        assert built.name == entry["deployments"][0]["name"]
        if role in models:
            assert built.max_replicas_per_node == 1
        number = PoolSize.parse(entry["args"]["workers" if role in models else "replicas"])
        if number.is_elastic:
            assert built.autoscaling_config.max_replicas == number.maximum


@variants
def test_configuration_is_valid_by_serves_own_schema(values):
    from ray.serve.schema import ServeDeploySchema

    parsed = ServeDeploySchema.model_validate(serve_config(values))
    for entry in parsed.applications:
        module, _, function = entry.import_path.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert parsed.grpc_options.grpc_servicer_functions == list(GRPC_SERVICERS)


def test_default_configuration_differs_from_the_package_only_as_needed():
    """With the values that say what the package's defaults say, nothing else is different."""
    values = {"orchestrator": {"replicas": 1}, "draft": {"gpus": 0}, "target": {"gpus": 0}}
    own, package = serve_config(values), yaml.safe_load(SERVE.read_text())
    for entry in own["applications"]:
        entry["deployments"][0]["ray_actor_options"].pop("num_gpus", None)
        for name in ("allowed_hosts", "device", "tensor_parallel"):
            entry["args"]["settings"].pop(name, None)
    assert own == package


def test_http_api_without_keys_allows_the_names_of_its_service_and_ingress():
    def allowed(values):
        return application("orchestrator", values)["args"]["settings"].get("allowed_hosts")

    service = ["", ".somewhere", ".somewhere.svc", ".somewhere.svc.cluster.local"]
    names = ",".join(f"demo-gammaray-http{domain}" for domain in service)
    ingress = {"ingress": {"enabled": True, "httpHost": "a.example", "grpcHost": "b.example"}}
    assert allowed({}) == names
    assert allowed(ingress) == f"{names},a.example"
    assert allowed({"orchestrator": {"settings": {"allowed_hosts": "c.example"}}}) == "c.example"
    assert allowed({**ingress, "apiKeysSecret": {"name": "keys"}}) is None
    OrchestratorSettings(allowed_hosts=allowed(ingress))


def test_draft_workers_know_the_targets_tokenizer_where_the_models_differ():
    models = {"models": {"target": "team/large", "draft": "team/small"}}
    assert settings("draft", models)["target"] == "team/large"
    assert "target" not in settings("draft")
    assert "target" not in settings("target", models)
    for given in ("", "/tokenizers/large"):
        values = {**models, "draft": {"settings": {"target": given}}}
        assert settings("draft", values)["target"] == given


OWN_ENGINE = {"engine": "vllm", "draft": {"settings": {"engine": "native"}}}


@pytest.mark.parametrize(
    ("role", "values", "expected"),
    [
        ("orchestrator", EVERYTHING, {"max_gamma": 6}),
        ("draft", EVERYTHING, {"draft_ahead": False}),
        ("draft", {}, {"device": "cuda"}),
        ("draft", VARIANTS["cpu-trial"], {"device": "cpu"}),
        ("target", VARIANTS["cpu-trial"], {"tensor_parallel": 1}),
        ("target", {"target": {"gpus": 4}}, {"tensor_parallel": 4}),
        ("target", OWN_ENGINE, {"engine": "vllm"}),
        ("draft", OWN_ENGINE, {"engine": "native"}),
    ],
)
def test_settings_follow_the_values_and_gpus_of_the_pool(role, values, expected):
    assert settings(role, values).items() >= expected.items()


def test_fixed_pools_report_their_load_if_others_scale():
    values = {"draft": {"workers": "1:3"}}
    assert application("target", values)["args"]["scaling"] == {}
    assert "scaling" not in application("target")["args"]


def test_keys_and_certificates_are_where_they_are_mounted():
    group = groups(EVERYTHING)
    for role in ("orchestrator", "draft", "target"):
        mounted = [mount["mountPath"] for mount in container(group[role]["template"])["volumeMounts"]]
        shown = settings(role, EVERYTHING)
        keys = [shown[name] for name in ("api_keys_file", "receipt_keys_file") if name in shown]
        assert len(keys) == (2 if role == "orchestrator" else 0)
        assert {shown["tls_dir"], *(path.rpartition("/")[0] for path in keys)} <= set(mounted)
        names = ("tls_dir", "api_keys_file", "receipt_keys_file")
        assert all(name not in settings(role) for name in names)


@pytest.mark.slow
def test_head_can_build_every_application_without_torch():
    """Serve builds the applications on the head, whose image has no torch."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def hide(name, *rest): return None if name.partition('.')[0] == 'torch' else find(name, *rest)\n"
        "PathFinder.find_spec = hide\n"
        "import services.serve.app, orchestrator.app, yaml\n"
        f"for entry in yaml.safe_load(open({str(SERVE)!r}))['applications']:\n"
        "    module, _, function = entry['import_path'].partition(':')\n"
        "    getattr(sys.modules[module], function)(entry['args'])\n"
        "print('built')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT
    )
    assert ended.stdout == "built\n", ended.stderr


@pytest.mark.parametrize(
    ("telemetry", "endpoint"),
    [
        ({}, None),
        ({"otlpEndpoint": "http://o:4317"}, "http://o:4317"),
        ({"jaeger": {"enabled": True}}, "http://demo-gammaray-jaeger:4317"),
        (
            {"otlpEndpoint": "http://o:4317", "collector": {"enabled": True}},
            "http://demo-gammaray-collector:4317",
        ),
    ],
)
def test_telemetry_is_sent_to_the_configured_endpoint(telemetry, endpoint):
    shown = environment(groups({"telemetry": telemetry})["draft"]["template"])
    assert shown.get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint


@pytest.mark.parametrize(
    ("telemetry", "exporters"),
    [
        ({}, ["debug"]),
        ({"otlpEndpoint": "https://o:4317"}, ["otlp/remote"]),
        ({"jaeger": {"enabled": True}}, ["otlp/jaeger"]),
    ],
)
def test_collector_forwards_to_the_endpoint(telemetry, exporters):
    values = {"telemetry": {**telemetry, "collector": {"enabled": True}}}
    config = yaml.safe_load(render(values)["configmap-collector.yaml"]["data"]["collector.yaml"])
    assert config["service"]["pipelines"]["traces"]["exporters"] == exporters
    assert set(exporters) <= config["exporters"].keys()


def test_dashboards_are_those_of_the_folder():
    data = render(EVERYTHING)["configmap-dashboards.yaml"].get("data") or {}
    assert set(data) == {path.name for path in (CHART / "dashboards").glob("*.json")}
