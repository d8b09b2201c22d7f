"""The wheels that `make dist` builds, installed into fresh environments: the client alone, and a cluster."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from sysconfig import get_path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from services.engine.native.build import VARIANTS
from tests.support.cluster.cluster_helpers import START_TIMEOUT_S, STOP_TIMEOUT_S, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ROOT = Path(__file__).parents[2]
SOURCES = ("gammaray", "orchestrator", "services", "pyproject.toml", "LICENSE", "docs/pypi.md")
MAX_CLIENT_BYTES = 1_000_000
SERVER_PACKAGES = ("torch", "ray", "redis", "transformers", "numpy", "fastapi", "gammaray_demo_pair")


def run(command: list[str], timeout_s: float = 120, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command without the variable that leads to the checkout."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, **more)


@dataclass
class Environment:
    folder: Path

    @property
    def site(self) -> Path:
        return Path(get_path("purelib", vars={"base": str(self.folder)}))

    def command(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, name: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        ended = run([self.command(name), *arguments], cwd=self.folder)
        assert ended.returncode == status, ended.stderr
        return ended

    def install(self, *wheels: Path) -> None:
        pip(self.command("python"), "install", "--no-deps", "--no-index", *map(str, wheels))


def pip(python: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", *arguments]
    ended = run(command)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def built(project: Path, out: Path) -> Path:
    """Build a project as `make dist` does and return its wheel, which is built from its source archive."""
    command = [sys.executable, "-m", "build", "--no-isolation", f"--outdir={out}", str(project)]
    ended = run(command, 250)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (archive,) = out.glob("*.tar.gz")
    archive.unlink()
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    source = tmp_path_factory.mktemp("source")
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "build")
    for name in SOURCES:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, source / name)
    return SimpleNamespace(
        client=built(source, tmp_path_factory.mktemp("client")),
        demo=built(source / "services" / "demo_pair", tmp_path_factory.mktemp("demo")),
    )


@pytest.fixture(scope="module")
def client_environment(wheels, tmp_path_factory):
    """The client's wheel and its dependencies, taken from the environment of this test without an index."""
    environment = fresh(tmp_path_factory.mktemp("client-environment"))
    for name in required("gammaray"):
        expose(name, environment.site)
    environment.install(wheels.client)
    return environment


def fresh(folder: Path) -> Environment:
    venv.create(folder, with_pip=False, symlinks=True)
    return Environment(folder)


def required(name: str) -> set[str]:
    """Return the distributions that one requires without extras, and those that they require."""
    found: set[str] = set()
    open_names = [name]
    while open_names:
        for line in distribution(open_names.pop()).requires or ():
            requirement = Requirement(line)
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in found:
                found.add(requirement.name)
                open_names.append(requirement.name)
    return found


def expose(name: str, site: Path) -> None:
    """Link the files of an installed distribution into another environment."""
    for file in distribution(name).files or ():
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(file.locate())))


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def texts(wheel: Path, place: str) -> list[str]:
    """Return the texts of a wheel whose paths contain a place."""
    with zipfile.ZipFile(wheel) as archive:
        return [archive.read(name).decode() for name in archive.namelist() if place in name]


def test_client_wheel_is_pure_and_small(wheels):
    assert wheels.client.name.endswith("-py3-none-any.whl")
    assert wheels.client.stat().st_size < MAX_CLIENT_BYTES
    held = names(wheels.client)
    assert not [name for name in held if name.endswith((".so", ".safetensors", "tokenizer.json"))]
    assert "services/engine/native/kernel.c" in held


def test_demo_wheel_holds_the_weights_and_both_licences(wheels):
    held = names(wheels.demo)
    assert {f"gammaray_demo_pair/{role}/model.safetensors" for role in ("target", "draft")} <= set(held)
    licences = texts(wheels.demo, ".dist-info/licenses/")
    assert len(licences) == 2
    assert any("Apache License" in text for text in licences)
    assert any("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in text for text in licences)


def test_package_description_has_no_relative_links(wheels):
    """Package indexes show the description without the repository: links into it would lead nowhere."""
    for wheel, licence in ((wheels.client, "Apache-2.0"), (wheels.demo, "Apache-2.0 AND PSF-2.0")):
        (text,) = texts(wheel, ".dist-info/METADATA")
        assert f"License-Expression: {licence}\n" in text
        assert "Description-Content-Type: text/markdown" in text
        assert text.count("Classifier: ") >= 4
        assert not re.findall(r"\]\((?!https?://)[^)]*\)", text)


def test_client_works_without_the_server_packages(client_environment):
    pip(client_environment.command("python"), "check")
    program = f"""
import importlib.util, json, sys, gammaray
from gammaray import AsyncClient, Client
absent = [name for name in {SERVER_PACKAGES!r} if importlib.util.find_spec(name) is None]
print(json.dumps([gammaray.__file__, absent]))
"""
    place, absent = json.loads(client_environment.run("python", "-c", program).stdout)
    assert Path(place).is_relative_to(client_environment.folder)
    assert absent == list(SERVER_PACKAGES)
    assert "generate" in client_environment.run("gammaray", "--help").stdout


def test_client_without_server_packages_names_the_extra_for_a_cluster(client_environment):
    ended = client_environment.run("gammaray", "up", status=1)
    assert "pip install 'gammaray[all]'" in ended.stderr


@pytest.mark.timeout(START_TIMEOUT_S + STOP_TIMEOUT_S)
def test_wheels_serve_a_completion(wheels, tmp_path, monkeypatch):
    environment = fresh(tmp_path)
    environment.install(wheels.client, wheels.demo)
    # Torch and the like are those of the environment of this test.
    (environment.site / "shared.pth").write_text(f"{get_path('purelib')}\n")
    program = "import gammaray_demo_pair, services; print(services.__file__, gammaray_demo_pair.__file__)"
    for place in environment.run("python", "-c", program).stdout.split():
        assert Path(place).is_relative_to(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with running_cluster(command=(environment.command("gammaray"), "up")) as cluster:
        options = ["--max-tokens", "16", "--temperature", "0", "--ignore-eos", "--json", "-a", cluster.grpc]
        answer = json.loads(environment.run("gammaray", "generate", "def read(path):", *options).stdout)
        assert answer["usage"]["completion_tokens"] == 16
        status = json.loads(environment.run("gammaray", "status", "--json", "-a", cluster.grpc).stdout)
    kernels = {process["role"]: process["kernel"] for process in status["processes"]}
    assert kernels["target"] == kernels["draft"]
    assert kernels["target"] in VARIANTS
