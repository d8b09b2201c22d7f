"""Hooks run what `make lint` runs, the CI workflow runs .ci/run, test files keep to public names."""

import re
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]


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


def test_the_dockerfile_names_modules_and_functions_that_exist():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    imports = re.findall(r"from ((?:gammaray|orchestrator|services)[\w.]*) import (\w+)", text)
    modules = re.findall(r'"-m", "((?:gammaray|orchestrator|services)[\w.]*)"', text)
    assert imports
    assert modules
    for module, name in imports:
        assert hasattr(import_module(module), name), (module, name)
    assert [module for module in modules if find_spec(module) is None] == []
