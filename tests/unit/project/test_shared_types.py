"""Types that several packages share are defined once: no second class has the name of one of them."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("gammaray", "orchestrator", "services")
SHARED = (
    "gammaray/blocks.py",
    "gammaray/types.py",
    "orchestrator/cycle/session.py",
    "orchestrator/cycle/types.py",
)


def classes(path):
    return [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


SCHEMAS = "orchestrator/api/http/response_types.py"
"""Its classes are named as the schemas of OpenAI's objects."""


@pytest.fixture(scope="module")
def places():
    """Class name -> the files that define it."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in classes(path):
                if path != ROOT / SCHEMAS:
                    found[name].append(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("path", SHARED)
def test_shared_types_are_defined_once(path, places):
    names = classes(ROOT / path)
    assert names
    assert {name: places[name] for name in names} == {name: [path] for name in names}
