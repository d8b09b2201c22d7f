"""Hooks run what `make lint` runs, the CI workflow runs .ci/run."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = ROOT / ".pre-commit-config.yaml"


def recipe(target):
    """Return the commands of a target of the Makefile, as words, with the path of the tools."""
    body = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]
    return [shlex.split(line.replace("$(BIN)", ".venv/bin")) for line in body.splitlines()]


def hooks():
    return [hook for repository in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repository["hooks"]]


def step(words):
    """Return what makes a command: the tool with its subcommand or script, without files and switches."""
    known = ("check", "format", "lint")
    return words[0], *(word for word in words[1:] if word in known or word.endswith(".py"))


def test_hooks_run_every_step_of_make_lint():
    assert {step(shlex.split(hook["entry"])) for hook in hooks()} == {step(words) for words in recipe("lint")}


def test_hooks_call_the_pinned_tools():
    for hook in hooks():
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/"), hook["id"]


@pytest.fixture
def clone(tmp_path):
    """A repository with the project's hooks, and a place of its own for what pre-commit stores."""
    shutil.copy(HOOKS, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name in ("ruff", "pre-commit"):
        (binaries / name).symlink_to(Path(sys.executable).parent / name)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    return tmp_path


def run_hook(clone, name):
    subprocess.run(["git", "add", "-A", ":!.venv"], cwd=clone, check=True, timeout=60)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        [clone / ".venv" / "bin" / "pre-commit", "run", name],
        cwd=clone,
        env={**environment, "PRE_COMMIT_HOME": str(clone / ".venv" / "store")},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_hooks_stop_a_commit_and_format_its_files(clone):
    module = clone / "module.py"
    module.write_text("import os\nx = {  'a':1}\n")
    refused = run_hook(clone, "ruff-check")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "F401" in refused.stdout
    module.write_text("x = {  'a':1}\n")
    assert run_hook(clone, "ruff-format").returncode == 1
    assert module.read_text() == 'x = {"a": 1}\n'
    assert run_hook(clone, "ruff-format").returncode == 0
    assert run_hook(clone, "ruff-check").returncode == 0


def test_workflow_runs_the_projects_own_script():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    assert workflow["permissions"] == {"contents": "read"}
    assert job["timeout-minutes"] <= 90


def test_test_modules_have_names_of_their_own():
    """Pytest imports them without packages, so that two with one name cannot be collected in one run."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for name, count in names.items() if count > 1} == set()
