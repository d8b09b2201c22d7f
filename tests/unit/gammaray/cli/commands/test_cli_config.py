"""`gammaray config`: what it prints, reads back and refuses."""

import json

import pytest
import yaml
from click.testing import CliRunner

from gammaray.cli import main
from gammaray.config import ClusterSettings
from gammaray.deploy.effective import REDACTED, redacted
from gammaray.deploy.serve_config import APPLICATIONS, SERVE_ENVIRONMENT, serve_document
from tests.support.serve_helpers import schema_of

PASSWORD = "hunter2"


def invoke(*arguments, **options):
    return CliRunner().invoke(main, ["config", *arguments], prog_name="gammaray", **options)


def printed(*arguments, **options):
    result = invoke(*arguments, **options)
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.output)


def document(**settings):
    return serve_document(ClusterSettings(**settings))


def test_own_settings_come_from_the_environment_and_the_defaults():
    shown = printed(env={"GAMMARAY_TARGET": "some/model", "GAMMARAY_MAX_GAMMA": "5"})
    assert shown["cluster"]["target"] == shown["target"]["model"] == shown["orchestrator"]["model"]
    assert shown["target"]["model"] == "some/model"
    assert shown["draft"]["model"] == "demo"
    assert shown["orchestrator"]["max_gamma"] == 5
    for role, application in APPLICATIONS.items():
        assert list(shown[role]) == list(application.settings.model_fields)


def test_json_equals_yaml():
    assert json.loads(invoke("--format", "json").output) == printed()


@pytest.mark.parametrize("arguments", [(), ("--format", "json"), ("--serve",)])
def test_passwords_are_never_printed(arguments):
    output = invoke(*arguments, env={"GAMMARAY_REDIS_URL": f"redis://user:{PASSWORD}@host:6379/1"}).output
    assert PASSWORD not in output
    assert arguments == ("--serve",) or f"redis://user:{REDACTED}@host:6379/1" in output


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"api_key": "abc"}, {"api_key": REDACTED}),
        ({"a": [{"client_secret": "abc"}]}, {"a": [{"client_secret": REDACTED}]}),
        ({"api_keys_file": "/etc/keys"}, {"api_keys_file": "/etc/keys"}),
        ({"max_tokens": 3, "token": ""}, {"max_tokens": 3, "token": ""}),
        ({"url": "rediss://:p%40ss@h/0"}, {"url": f"rediss://:{REDACTED}@h/0"}),
        ({"url": "unix:///r.sock?password=pass&db=1"}, {"url": f"unix:///r.sock?password={REDACTED}&db=1"}),
        (
            {"url": "redis+sentinel://h:1/s/0?sentinel_password=pass"},
            {"url": f"redis+sentinel://h:1/s/0?sentinel_password={REDACTED}"},
        ),
        ({"url": "redis://h:6379/0", "model": "a:b@c"}, {"url": "redis://h:6379/0", "model": "a:b@c"}),
    ],
)
def test_redaction_hides_secrets_and_nothing_else(given, shown):
    assert redacted(given) == shown


def test_serve_configuration_is_read_back(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(invoke("--serve", env={"GAMMARAY_DRAFT_WORKERS": "0:4", "GAMMARAY_DRAFT": "d"}).output)
    shown = printed(str(path))
    assert (shown["http_port"], shown["grpc_port"]) == (8000, 9000)
    assert shown["draft"]["workers"] == "0:4"
    assert shown["draft"]["scaling"]["draft_load"] == 4.0
    assert shown["draft"]["settings"]["model"] == "d"
    assert shown["target"]["takes"]["resources"] == {"gammaray_target": 1}
    assert shown["orchestrator"]["settings"]["max_gamma"] == 8


def first_application(config):
    return config["applications"][0]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda c: first_application(c)["args"]["settings"].update(modle="x"), "modle"),
        (lambda c: first_application(c)["args"]["settings"].update(threads=0), "threads"),
        (lambda c: first_application(c)["args"].update(workers="3:1"), "workers"),
        (lambda c: first_application(c)["args"].update(wrokers="3"), "wrokers"),
        (lambda c: first_application(c).update(import_path="os:system"), "import_path"),
        (lambda c: first_application(c).update(route_prefix="/"), "route_prefix"),
        (lambda c: first_application(c).update(name="other"), "applications.name"),
        (lambda c: first_application(c)["deployments"][0].update(name="X"), "deployments.name"),
        (lambda c: c["applications"].pop(), "orchestrator"),
        (lambda c: c["grpc_options"].update(grpc_servicer_functions=[]), "grpc_servicer_functions"),
        (lambda c: c.pop("http_options"), "http_options"),
    ],
)
def test_serve_configuration_with_an_error_is_refused_by_name(spoil, reason):
    config = document()
    spoil(config)
    result = invoke("-", input=yaml.safe_dump(config))
    assert result.exit_code == 2
    assert reason in result.output


def test_builders_accept_the_configuration():
    import importlib

    for entry in document(draft_workers="0:3", target_workers="2")["applications"]:
        module, _, function = entry["import_path"].partition(":")
        application = getattr(importlib.import_module(module), function)(entry["args"])
        deployment = schema_of(application)
        assert deployment.name == entry["deployments"][0]["name"]
        if deployment.name == "DraftWorker":
            assert deployment.autoscaling_config.max_replicas == 3
        if deployment.name == "TargetWorker":
            assert deployment.max_replicas_per_node == 1


def test_launcher_uses_the_same_environment(tmp_path):
    from orchestrator.launcher.cluster import serve_environment

    assert serve_environment(tmp_path, "127.0.0.1").items() >= SERVE_ENVIRONMENT.items()
