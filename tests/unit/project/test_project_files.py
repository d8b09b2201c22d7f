"""Hooks run what `make lint` runs, the CI workflow runs .ci/run, test files keep to public names."""

import re
import shlex
from collections import Counter
from pathlib import Path

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


PRIVATE = (
    r"(?:from|import) (?:benchmarks|gammaray|orchestrator|services)[\w.]*\b_[a-z]\w*"
    r"|from (?:benchmarks|gammaray|orchestrator|services)\b[\w.]* import (?:\(\s*)?(?:\w+,\s*)*_[a-z]\w*"
    r"|(?:attr|methodcaller|object|patch)\((?:[\w.]+, )?[\"'](?:[\w.]+\.)?_[a-z]\w*[\"']"
)
"""Imports of our private names, and such names as text; ruff finds accesses."""


def test_tests_name_no_private_name_of_ours():
    planted = (
        "from services.engine._x import y",
        "from gammaray import (\n    a,\n    _b",
        "import services._x",
    )
    planted += ("setattr(module, '_x'", "patch('gammaray.cli._x.y._z'", 'getattr(one.two, "_x"')
    assert all(re.search(PRIVATE, text) for text in planted)
    for path in (ROOT / "tests").rglob("*.py"):
        found = re.search(PRIVATE, path.read_text())
        assert found is None or path == Path(__file__), (path, found)
