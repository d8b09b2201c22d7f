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
from pathlib import Path
from types import CodeType

from services.vllm.plugin import needs

_Definition = ast.ClassDef | ast.FunctionDef


class Source:
    """The package vllm as text."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def look(self, name: str) -> needs.Found:
        """Return what is under a key of the plug-in's tables.

        Raises:
            AttributeError: Nothing is there.
        """
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
        path = self._folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return ast.parse(file.read_text())
        raise AttributeError(f"no module {name}")

    def _defined(self, module: str, name: str) -> tuple[str, _Definition]:
        for each in _top_level(self._module(module).body):
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
                path = self._folder.joinpath(*module.split("."))
                files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()]
                text = files[0].read_text() if files else ""
                for name in (alias.name for alias in each.names):
                    if not re.search(rf"\b{name}\b", text) and not (path / f"{name}.py").exists():
                        yield f"{program.name} imports {name} of {module}"


def names_in(function: ast.FunctionDef) -> set[str]:
    """Return the global names and attributes in a function's code, as in `co_names`."""
    code = compile(ast.Module([function], []), "vllm", "exec")
    return {
        name
        for each in code.co_consts
        if isinstance(each, CodeType) and each.co_name == function.name
        for name in each.co_names
    }


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for each in body:
        yield each
        if isinstance(each, ast.If | ast.Try):
            yield from _top_level([*each.body, *each.orelse])


def _parameters(function: ast.FunctionDef) -> tuple[list[str], list[str]]:
    """Return a function's parameters, and those without defaults."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    required = [*places[: len(places) - len(given.defaults)]]
    required += [one for one, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is None]
    return [one.arg for one in (*places, *given.kwonlyargs)], [one.arg for one in required]


def main() -> None:
    """Compare each folder; exit with 1 if something differs."""
    differing = 0
    for folder in sys.argv[1:]:
        for is_second, runner in ((False, "V1"), (True, "V2")):
            source = Source(Path(folder))
            found = list(needs.differences(is_second, source.look))
            for name in ("hooks", "second_runner" if is_second else "sampler"):
                found += source.unknown_imports(Path(needs.__file__).with_name(f"{name}.py"))
            print(f"{folder} {runner}: {len(found)} differ", *found, sep="\n  ", flush=True)
            differing += len(found)
    sys.exit(differing > 0 or len(sys.argv) < 2)


if __name__ == "__main__":
    main()
