"""Tests use public names only, so that changes inside a class do not break them.

Counted on the syntax trees of all tests are private attributes, private names that are given as text to
functions such as `setattr`, and imports of private names and modules. Not counted are attributes of `self`
and `cls` that the test's own class defines, or a base class of it that is a test's, too.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]

ACCESSES = [
    "application._bound_deployment",
    "client._controller",
    "from ray._private import ray_constants",
    "from ray.autoscaler._private.kuberay.autoscaling_config import _get_custom_resources",
    "from ray.autoscaler._private.kuberay.autoscaling_config import _get_num_gpus",
    "from ray.serve._private import constants",
    "from ray.serve.context import _get_global_client",
    "from torch.utils._python_dispatch import TorchDispatchMode",
]
"""Of Ray and torch, which have no public name for them; none is of this project."""

PRIVATE = re.compile(r"_[^\W_]\w*")
PUBLIC_ALL_THE_SAME = {"_asdict", "_exit", "_fields", "_make", "_replace"}
"""Of `collections.namedtuple` and `os`, which document them."""

BY_TEXT = {"attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "object", "patch", "setattr"}
"""Functions that take the name of an attribute as text; `object` is that of `mock.patch.object`."""

Classes = dict[str, list[ast.ClassDef]]


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, is private."""
    return any(
        PRIVATE.fullmatch(part) is not None and part not in PUBLIC_ALL_THE_SAME for part in name.split(".")
    )


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def classes_of(trees: Iterable[ast.AST]) -> Classes:
    classes: Classes = defaultdict(list)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(node)
    return classes


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a class defines: functions, variables, and attributes of `self` that it sets."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            yield node.attr


def own_names(cls: ast.ClassDef, classes: Classes) -> set[str]:
    """Return the names that a class and those of its base classes that are in `classes` define."""
    family = [cls]
    for member in family:
        for base in member.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            family += [parent for parent in classes.get(name, ()) if parent not in family]
    return {name for member in family for name in defined(member)}


def own_accesses(tree: ast.AST, classes: Classes) -> Iterator[ast.Attribute]:
    """Yield the accesses of classes to what they define themselves."""
    for cls in ast.walk(tree):
        if isinstance(cls, ast.ClassDef):
            names = own_names(cls, classes)
            for node in ast.walk(cls):
                if isinstance(node, ast.Attribute) and is_of_self(node) and node.attr in names:
                    yield node


def private_accesses(tree: ast.AST, classes: Classes) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each access to a private name.

    Args:
        tree: A test file.
        classes: The classes of all tests by name.
    """
    own = set(own_accesses(tree, classes))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node not in own:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            for argument in node.args[:2] if function in BY_TEXT else ():
                name = argument.value if isinstance(argument, ast.Constant) else None
                if isinstance(name, str) and is_private(name):
                    yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if is_private(alias.name):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"from {node.module} import {alias.name}"


def test_tests_do_not_access_private_names() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    classes = classes_of(trees.values())
    found = [
        (text, f"{path.relative_to(TESTS)}:{line}: {text}")
        for path, tree in trees.items()
        for line, text in private_accesses(tree, classes)
    ]
    assert sorted(text for text, _ in found) == ACCESSES, "\n".join(place for _, place in found)


def test_private_access_is_counted(subtests) -> None:
    for source, num_accesses in [
        ("worker._engine._scheduler", 2),
        ("super()._take()", 1),
        ("x._y = 1", 1),
        ("class A:\n def f(self): self._own = self._own + 1", 0),
        ("class A:\n _own = 1\n @classmethod\n def f(cls): cls._own", 0),
        ("class A:\n _own = 1\nclass B(package.A[int]):\n def f(self): self._own", 0),
        ("class A:\n _own = 1\nclass B(Base):\n def f(self): self._own", 1),
        ("class A:\n _own = 1\ndef replacement(self): self._own", 1),
        ("monkeypatch.setattr(module, '_function', None)", 1),
        ("monkeypatch.setattr('package._module.function', 1)", 1),
        ("monkeypatch.setattr(module, 'function', None)", 0),
        ("from package import _function as function", 1),
        ("import package._module, package.module", 1),
        ("point._replace(x=1)", 0),
        ("x.__class__, x.public_name, print('_text')", 0),
    ]:
        with subtests.test(str((source, num_accesses))[:80]):
            tree = ast.parse(source)
            assert len(list(private_accesses(tree, classes_of([tree])))) == num_accesses
