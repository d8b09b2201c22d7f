"""Environment variables: misspelt ones are refused by every process, the list of known ones is complete."""

import re
from pathlib import Path

import pytest

from gammaray.config import ClusterSettings, OrchestratorSettings, TargetSettings, known_variables
from gammaray.environment import check_environment, past_proxies
from gammaray.errors import InvalidArgumentError
from tests.support.cli_helpers import invoke
from tests.support.own_process import ROOT

FOLDERS = ("gammaray", "orchestrator", "services", "benchmarks", "docs", "helm", "tests")
ENDINGS = {".py", ".md", ".yaml", ".tpl", ".txt", ".sh", ".gotmpl"}
NAME = re.compile(r"\bGAMMARAY_[A-Z0-9_]*[A-Z0-9]\b")
SECRET = "hunter2"


def sources():
    for folder in FOLDERS:
        yield from (file for file in (ROOT / folder).rglob("*") if file.suffix in ENDINGS)
    yield from (ROOT / "docker").rglob("*")
    yield ROOT / "README.md"


def test_every_variable_that_the_repository_names_is_known():
    known = known_variables()
    unknown = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in sources()
        if file.is_file() and file.name != Path(__file__).name
        for name in NAME.findall(file.read_text(errors="ignore"))
        if name not in known and not any(other.startswith(f"{name}_") for other in known)
    }
    assert unknown == set()


def test_every_known_variable_passes():
    check_environment(known_variables, dict.fromkeys(known_variables(), "x"))
    check_environment(known_variables, {"PATH": "x", "GAMMA": "x", "MY_GAMMARAY_THING": "x"})


def test_misspelt_variable_names_the_nearest_and_not_its_value():
    for wrong, right in (
        ("GAMMARAY_HTTP_PROT", "GAMMARAY_HTTP_PORT"),
        ("GAMMARAY_APIKEY", "GAMMARAY_API_KEY"),
        ("gammaray_max_gama", "GAMMARAY_MAX_GAMMA"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^{wrong}: .*nearest name is {right}$") as caught:
            check_environment(known_variables, {wrong: SECRET})
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("settings", [ClusterSettings, OrchestratorSettings, TargetSettings])
def test_settings_of_every_process_refuse_it(monkeypatch, settings):
    monkeypatch.setenv("GAMMARAY_REDISURL", "x")
    with pytest.raises(InvalidArgumentError, match="GAMMARAY_REDIS_URL"):
        settings()


def test_variables_of_kubernetes_services_are_left_alone():
    links = {
        "GAMMARAY_HEAD_SVC_SERVICE_HOST": "10.0.0.1",
        "GAMMARAY_HEAD_SVC_SERVICE_PORT": "6379",
        "GAMMARAY_HEAD_SVC_SERVICE_PORT_DASHBOARD": "8265",
        "GAMMARAY_HEAD_SVC_PORT": "tcp://10.0.0.1:6379",
        "GAMMARAY_HEAD_SVC_PORT_6379_TCP_ADDR": "10.0.0.1",
    }
    check_environment(known_variables, links)
    with pytest.raises(InvalidArgumentError):
        check_environment(known_variables, {**links, "GAMMARAY_HEAD_PROT": "1"})


@pytest.mark.parametrize("arguments", [["status"], ["up"], ["keys", "list"]], ids=" ".join)
def test_command_line_refuses_it_with_exit_code_2_except_for_help(arguments):
    environment = {"GAMMARAY_DEVCIE": "cpu"}
    result = invoke(*arguments, env=environment)
    assert result.exit_code == 2
    assert "GAMMARAY_DEVCIE" in result.stderr
    assert "GAMMARAY_DEVICE" in result.stderr
    assert result.stderr.count("\n") == 1
    assert invoke(*arguments, "--help", env=environment).exit_code == 0
    assert invoke("--help", env=environment).exit_code == 0


def test_hosts_are_added_to_those_without_a_proxy():
    for environment, expected in (
        ({}, "a,b"),
        ({"no_proxy": "c , d"}, "c , d,a,b"),
        ({"NO_PROXY": "c"}, "c,a,b"),
        ({"no_proxy": "c", "NO_PROXY": "d"}, "c,a,b"),
        ({"no_proxy": " ", "NO_PROXY": "d"}, "d,a,b"),
        ({"no_proxy": "b,c"}, "b,c,a"),
    ):
        found = past_proxies({**environment, "http_proxy": "http://127.0.0.1:9"}, "a", "b")
        assert found == {"no_proxy": expected, "NO_PROXY": expected}
    assert past_proxies({"NO_PROXY": "*"}, "a") == {}  # names beside it would take its meaning away
