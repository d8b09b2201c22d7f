"""Tests use public names only, so that changes inside a class do not break them.

Counted on the syntax trees of all tests are private attributes of anything but the test's own `self` and
`cls`, private names that are given as text to functions such as `setattr`, and imports of private names. On
`self` and `cls` a private attribute counts where no test defines it: it is then a base class's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

MAX_ACCESSES = 4
"""All are of Ray, which has no public name for them; none is of this project."""

PRIVATE = re.compile(r"_[^\W_]\w*")
PUBLIC_ALL_THE_SAME = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Of `collections.namedtuple` and `os`, which document them."""

BY_TEXT = {"delattr", "getattr", "hasattr", "object", "patch", "setattr"}
"""Functions that take the name of an attribute as text; `object` is that of `mock.patch.object`."""


def is_private(name: str) -> bool:
    return PRIVATE.fullmatch(name) is not None and name not in PUBLIC_ALL_THE_SAME


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a test defines: functions, variables, and attributes of `self` that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_accesses(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each access to a private name.

    Args:
        tree: A test file.
        own: Names that tests define.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (is_of_self(node) and node.attr in own):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for argument in node.args[:2] if function in BY_TEXT else ():
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and is_private(name.rpartition(".")[2]):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"


def test_tests_do_not_access_private_names() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = [
        f"{path.relative_to(TESTS)}:{line}: {text}"
        for path, tree in trees.items()
        for line, text in private_accesses(tree, own)
    ]
    assert len(found) <= MAX_ACCESSES, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "num_accesses"),
    [
        ("worker._engine.call()", 1),
        ("worker._engine._scheduler", 2),
        ("module._CONSTANT", 1),
        ("super()._take()", 1),
        ("x._y = 1", 1),
        ("self._own, cls._own", 0),
        ("self._of_the_base", 1),
        ("monkeypatch.setattr(module, '_function', None)", 1),
        ("monkeypatch.setattr('package.module._CONSTANT', 1)", 1),
        ("monkeypatch.setattr(module, 'function', None)", 0),
        ("mock.patch.object(module, '_function')", 1),
        ("getattr(worker, '_engine')", 1),
        ("from package.module import _function, function", 1),
        ("from package import _function as function", 1),
        ("point._replace(x=1)", 0),
        ("x.__class__, x.public_name", 0),
        ("print('_text')", 0),
    ],
)
def test_private_access_is_counted(source: str, num_accesses: int) -> None:
    assert len(list(private_accesses(ast.parse(source), {"_own"}))) == num_accesses
