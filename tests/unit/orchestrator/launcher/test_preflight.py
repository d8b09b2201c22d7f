"""What the launcher checks before a cluster starts: settings of workers, models, and access."""

import json
from pathlib import Path

import pytest

from gammaray.checks import is_loopback
from gammaray.config import ClusterSettings, OrchestratorSettings, PoolSize
from gammaray.demo_pair import resolve_model
from gammaray.deploy.serve_config import role_settings
from gammaray.errors import InvalidArgumentError, UnauthenticatedError
from gammaray.security.keys import create_key, hash_key
from orchestrator.access.caller import Authenticator
from orchestrator.launcher.cluster import parse_options
from orchestrator.launcher.preflight import (
    check_drafting_head,
    check_host,
    check_models,
    check_port,
    check_workers,
    drafting_notes,
    worker_cores,
    worker_gpus,
)
from orchestrator.launcher.trust import arrange_trust, check_access
from tests.support.own_process import run_code


def test_defaults_take_the_gpus_that_there_are():
    check_workers(ClusterSettings())
    assert worker_gpus(ClusterSettings(), 0) == {"target": 0.0, "draft": 0.0}
    assert worker_gpus(ClusterSettings(), 2) == {"target": 1.0, "draft": 1.0}
    assert worker_gpus(ClusterSettings(device="cuda"), 1) == {"target": 0.5, "draft": 0.5}
    for settings in ({"device": "cpu"}, {"engine": "native"}):
        assert worker_gpus(ClusterSettings(**settings), 2) == {"target": 0.0, "draft": 0.0}


def test_settings_that_do_not_fit_the_devices_are_refused_with_the_reason():
    with pytest.raises(InvalidArgumentError, match=r"device: got cuda, .*Ray finds no GPU"):
        worker_gpus(ClusterSettings(device="cuda"), 0)
    with pytest.raises(InvalidArgumentError, match="device: got cpu, allowed: auto or"):
        check_workers(ClusterSettings(engine="vllm", deterministic=True, device="cpu"))
    check_workers(ClusterSettings(deterministic=True, device="cpu"))
    assert ClusterSettings(engine="vllm", deterministic=True, dtype="bfloat16").deterministic


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"THREADS": "0"}, "threads"),
        ({"THREADS": "2", "DETERMINISTIC": "1"}, "threads"),
        ({"CACHE_MEMORY_SHARE": "inf"}, "cache_memory_share"),
        ({"SESSION_TTL_S": "0"}, "session_ttl_s"),
    ],
    ids=str,
)
def test_settings_of_the_roles_in_the_environment_are_checked_too(monkeypatch, variables, field):
    for name, value in variables.items():
        monkeypatch.setenv(f"GAMMARAY_{name}", value)
    with pytest.raises(InvalidArgumentError, match=f"^{field}: got"):
        check_workers(ClusterSettings())


def test_settings_of_the_roles_that_fit_pass(monkeypatch):
    monkeypatch.setenv("GAMMARAY_METRICS_LISTEN", "127.0.0.1:9464-9466")
    monkeypatch.setenv("GAMMARAY_THREADS", "2")
    check_workers(ClusterSettings())


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid"])
def test_address_of_another_machine_is_reported_as_the_host(host):
    with pytest.raises(InvalidArgumentError, match=f"host: got {host}"):
        check_port("http_port", host, 8000)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("engine", {"engine": "transformers"}, {"target": "transformers", "draft": "transformers"}),
        ("dtype", {"dtype": "float16"}, {"target": "float16", "draft": "float16"}),
        ("draft_weights", {"draft_weights": "int8"}, {"draft": "int8"}),
        ("draft_weights", {"draft_weights": "int8", "head": "h"}, {"target": "int8", "draft": "int8"}),
        ("learn", {"target": "t", "learn": "/l", "head": "h", "engine": "vllm"}, {"target": "/l"}),
        ("target", {"target": "t", "draft": "early-exit:2"}, {"draft": "t"}),
        ("target", {}, {}),
    ],
)
def test_settings_reach_the_roles_that_have_them(name, settings, expected):
    roles = role_settings(ClusterSettings(**settings))
    assert {role: fields[name] for role, fields in roles.items() if name in fields} == expected


REFUSED = """
import json, os, sys
out = os.fdopen(os.dup(1), "w")  # the launcher keeps standard output for its announcement
from orchestrator.launcher.cluster import main
status = main(["--dtype", "bfloat16", "--deterministic"])
print(json.dumps([status, sorted(sys.modules)]), file=out)
"""


def test_launcher_refuses_before_anything_slow_is_imported():
    done = run_code(REFUSED)
    status, modules = json.loads(done.stdout)
    assert status == 2
    assert done.stderr.startswith("gammaray: ")
    assert done.stderr.count("\n") == 1
    assert not {"ray", "torch", "transformers", "fastapi", "redis"}.intersection(modules)


@pytest.mark.parametrize(
    ("cores", "num_targets", "num_drafts", "threads", "wanted"),
    [
        ({1, 0}, 1, 1, 1, {"target": (0,), "draft": (1,)}),
        ({3, 4, 5, 9}, 2, 1, 1, {"target": (3, 4), "draft": (5,)}),
        ({0, 1}, 1, 0, 1, {"target": (0,), "draft": ()}),
        ({0}, 1, 1, 1, {"target": (), "draft": ()}),
        ({0, 1}, 2, 1, 1, {"target": (), "draft": ()}),
        ({0, 1, 2, 3, 4}, 1, 1, 2, {"target": (0, 1), "draft": (2, 3)}),
        ({0, 1, 2}, 1, 1, 2, {"target": (), "draft": ()}),
    ],
)
def test_worker_cores_are_disjoint_or_none(cores, num_targets, num_drafts, threads, wanted):
    assert worker_cores(cores, num_targets, num_drafts, threads) == wanted


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_host_at_which_the_proxy_reaches_its_replicas_is_taken(host):
    check_host(host)


@pytest.mark.parametrize("host", ["127.0.0.2", "192.0.2.1"])
def test_other_host_is_refused(host):
    with pytest.raises(InvalidArgumentError, match=f"host: got {host}, allowed: 127.0.0.1, or 0.0.0.0"):
        check_host(host)


def test_orchestrators_alone_have_no_workers_and_need_a_redis():
    cluster = ClusterSettings(target_workers="0", redis_url="redis://127.0.0.1")
    assert (cluster.target_workers.maximum, cluster.draft_workers.maximum) == (0, 0)
    with pytest.raises(InvalidArgumentError, match="target_workers: got 0, allowed: at least 1"):
        ClusterSettings(target_workers="0")


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys.json"
    create_key(path, "acme")
    return str(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_check_access_loopback_needs_no_keys(host):
    assert is_loopback(host)
    check_access(ClusterSettings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org"])
def test_check_access_public_address_needs_keys_or_none_by_name(host, keys):
    with pytest.raises(InvalidArgumentError, match=r"host: got .*allowed: .*gammaray keys create"):
        check_access(ClusterSettings(host=host))
    check_access(ClusterSettings(host=host, api_keys_file=keys))
    check_access(ClusterSettings(host=host, api_keys_file="none"))


def test_check_access_key_file_without_keys_is_reported(keys, tmp_path):
    with pytest.raises(InvalidArgumentError, match="api_keys_file"):
        check_access(ClusterSettings(api_keys_file=str(tmp_path / "none")))
    with pytest.raises(InvalidArgumentError, match="receipt_keys_file"):
        check_access(ClusterSettings(receipt_keys_file=keys))
    empty = tmp_path / "empty.json"
    empty.write_text('{"version": 1, "keys": []}')
    with pytest.raises(InvalidArgumentError, match="api_keys_file"):
        check_access(ClusterSettings(api_keys_file=str(empty)))


def test_arrange_trust_gives_the_launcher_a_key_of_its_own(keys):
    trust = arrange_trust(ClusterSettings(api_keys_file=keys))
    assert trust.api_key is not None
    settings = OrchestratorSettings(**trust.orchestrator)
    assert trust.probe_key_sha256 == hash_key(trust.api_key)
    assert trust.api_key not in repr(settings)
    door = Authenticator(settings.key_file, trust.probe_key_sha256, trust.local_only)
    caller = door.identify({"authorization": f"Bearer {trust.api_key}"})
    assert caller.tenant == "gammaray-probe"


def test_arrange_trust_without_keys_stays_on_this_machine():
    trust = arrange_trust(ClusterSettings())
    assert trust.api_key is None
    settings = OrchestratorSettings(**trust.orchestrator)
    door = Authenticator(settings.key_file, trust.probe_key_sha256, trust.local_only)
    for peer in ("", "ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "unix:"):
        assert door.identify({}, peer).tenant == ""
    for peer in ("ipv4:10.0.0.1:5", "ipv6:[fe80::1]:5", "ipv4:128.0.0.1:127"):
        with pytest.raises(UnauthenticatedError):
            door.identify({}, peer)


def test_settings_do_not_show_the_password_of_redis():
    url = "redis://:hunter2@h:1/0"
    for settings in (ClusterSettings(redis_url=url), OrchestratorSettings(redis_url=url)):
        assert "hunter2" not in repr(settings)
        assert "hunter2" not in str(settings)


def test_gguf_file_is_refused_by_its_setting_with_the_command_that_converts_it(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    assert resolve_model(str(tmp_path / "folder.gguf")) == str(tmp_path / "folder.gguf")
    for target, draft, field in (("Model.GGUF", "demo", "target"), ("demo", "m.gguf", "draft")):
        words = rf"^{field}: got .*services\.engine\.convert FILE\.gguf DIR"
        with pytest.raises(InvalidArgumentError, match=words):
            check_models(target, draft)


def test_target_without_a_draft_has_no_draft_workers_and_a_note(monkeypatch):
    own = [("--target x", 0), ("--target x --draft y", 1), ("--target x --draft-workers 2", 2)]
    for line, count in (*own, ("--target demo", 1), ("", 1)):
        assert parse_options(line.split())[0].draft_workers == PoolSize(count), line
    monkeypatch.setenv("GAMMARAY_TARGET", "x")
    assert parse_options([])[0].draft_workers == PoolSize(0)
    monkeypatch.setenv("GAMMARAY_DRAFT", "y")
    assert parse_options([])[0].draft_workers == PoolSize(1)
    monkeypatch.delenv("GAMMARAY_DRAFT")
    (note,) = drafting_notes(ClusterSettings(target="x"))
    assert "look-ups in the text" in note


def test_head_drafts_alone_unless_a_draft_is_named_and_must_exist(tmp_path):
    settings = ClusterSettings(head="some/head")
    assert settings.draft_workers.maximum == 0
    assert drafting_notes(settings) == ["the head some/head drafts in the target workers"]
    assert ClusterSettings(head="some/head", draft="y").draft_workers == PoolSize(1)
    check_drafting_head("")
    check_drafting_head("a/name-on-the-hub")
    with pytest.raises(InvalidArgumentError, match=r"head: got .*absent"):
        check_drafting_head(str(tmp_path / "absent"))


ORDINARY, OWN = "an ordinary draft model", "one of demo's vocabulary"


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        *(("early-exit:2", ORDINARY), ({"draft_vocab_size": 50}, ORDINARY), ({"pard_token": 5}, ORDINARY)),
        ({"vocab_size": 96}, OWN),
    ],
    ids=str,
)
def test_drafts_that_vllm_does_not_serve_are_refused_before_the_cluster_starts(tmp_path, draft, words):
    if isinstance(draft, dict):
        stored = json.loads((Path(resolve_model("demo", "draft")) / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**stored, **draft}))
        draft = str(tmp_path)
    with pytest.raises(InvalidArgumentError, match=f"draft: got .*{words} with the engine vllm"):
        check_models("demo", draft, "vllm")
    check_models("demo", draft)


def test_directories_that_do_not_exist_are_named_as_such(tmp_path):
    missing = str(tmp_path / "missing")
    for field, target, draft in (("target", missing, "demo"), ("draft", "demo", missing)):
        with pytest.raises(InvalidArgumentError, match=f"{field}: got '{missing}', which does not exist"):
            check_models(target, draft)
    with pytest.raises(InvalidArgumentError, match=f"lora: got x={missing}, .*does not exist"):
        check_workers(ClusterSettings(lora=f"x={missing}"))
