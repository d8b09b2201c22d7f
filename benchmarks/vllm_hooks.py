"""Which releases of vLLM the plug-in gammaray-vllm fits: its own check, against source that is not run.

    python -m benchmarks.vllm_hooks DIR ...

A DIR contains the package vllm, such as an unpacked wheel. For each, and for each of vLLM's model runners, it
prints how many of the places that the plug-in replaces, calls or reads differ, and which.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from types import CodeType

from services.vllm.plugin import needs

_Definition = ast.ClassDef | ast.FunctionDef


class Source:
    """The package vllm as text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self, name: str) -> needs.Found:
        """Return what is under a key of the plug-in's tables; raises AttributeError if nothing is."""
        module, _, path = name.partition(":")
        first, *rest = path.split(".")
        module, found = self._defined(module, first)
        for part in rest:
            found = self._method(found, part)
        if isinstance(found, ast.FunctionDef):
            return needs.Found(*_parameters(found), names_in(found))
        names = {name for each in found.body if isinstance(each, ast.FunctionDef) for name in names_in(each)}
        try:
            parameters, required = _parameters(self._method(found, "__init__"))
            return needs.Found(parameters[1:], required[1:], names)
        except AttributeError:  # a dataclass or a named tuple
            fields = [ast.unparse(each.target) for each in found.body if isinstance(each, ast.AnnAssign)]
            return needs.Found(fields, fields, names)

    @functools.cache  # noqa: B019
    def _module(self, name: str) -> ast.Module:
        return ast.parse(self._text(name))

    def _text(self, module: str) -> str:
        path = self._folder.joinpath(*module.split("."))
        files = (path.with_suffix(".py"), path / "__init__.py")
        return "".join(file.read_text() for file in files if file.exists())

    def _defined(self, module: str, name: str) -> tuple[str, _Definition]:
        for each in ast.walk(self._module(module)):  # what is not within a class or function first
            if isinstance(each, _Definition) and each.name == name:
                return module, each
            if isinstance(each, ast.ImportFrom) and each.module:
                for alias in each.names:
                    if name == (alias.asname or alias.name):
                        return self._defined(each.module, alias.name)
        raise AttributeError(f"no {name} in {module}")

    def _method(self, found: _Definition, name: str) -> ast.FunctionDef:
        for each in found.body:
            if isinstance(each, ast.FunctionDef) and each.name == name:
                return each
        raise AttributeError(f"no {name}")

    def unknown_imports(self, program: Path) -> Iterator[str]:
        """Yield what a file imports of vLLM that this vLLM does not name."""
        for each in ast.walk(ast.parse(program.read_text())):
            if isinstance(each, ast.ImportFrom) and (module := each.module or "").startswith("vllm"):
                for name in (alias.name for alias in each.names):
                    is_named = re.search(rf"\b{name}\b", self._text(module))
                    if not is_named and not self._text(f"{module}.{name}"):
                        yield f"{program.name} imports {name} of {module}"


def names_in(function: ast.FunctionDef) -> set[str]:
    """Return the global names and attributes in a function's code, as in `co_names`."""
    made = compile(ast.Module([function], []), "vllm", "exec").co_consts
    codes = [each for each in made if isinstance(each, CodeType) and each.co_name == function.name]
    return {name for code in codes for name in code.co_names}


def _parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Return a function's parameters, and those without defaults."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    values = [None] * (len(places) - len(given.defaults)) + given.defaults + given.kw_defaults
    names = [one.arg for one in (*places, *given.kwonlyargs)]
    return names, [name for name, value in zip(names, values, strict=True) if value is None]


def compared(folder: Path, is_second: bool) -> list[str]:
    """Return where the package vllm in a folder differs from what the plug-in needs for a model runner."""
    source = Source(folder)
    files = ("hooks", "second_runner" if is_second else "sampler")
    unknown = (source.unknown_imports(Path(needs.__file__).with_name(f"{name}.py")) for name in files)
    return [*needs.differences(is_second, source.look), *chain(*unknown)]


def main() -> None:
    """Compare each folder; exit with 1 if something differs."""
    cases = [*product(sys.argv[1:], (False, True))]
    found = [compared(Path(folder), is_second) for folder, is_second in cases]
    for (folder, is_second), differing in zip(cases, found, strict=True):
        print(f"{folder} V{1 + is_second}: {len(differing)} differ", *differing, sep="\n  ")
    sys.exit(any(found))


if __name__ == "__main__":
    main()
