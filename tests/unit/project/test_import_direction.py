"""Imports go to lower floors only, checked on the syntax trees of the files.

A room is a folder of modules. Its files may import each other and rooms on lower floors, without circles.
Imports inside functions, under TYPE_CHECKING and by `import_module("a literal")` count like all others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OURS = ("gammaray", "orchestrator", "services")

ROWS = re.findall(
    r"^\| (\d+) \| \[`([\w/]+)`\]\(\.\./([\w/]+)\) \| \S",
    (ROOT / "docs" / "architecture.md").read_text(),
    re.MULTILINE,
)
FLOORS = {room: int(floor) for floor, room, _ in ROWS}
"""Room -> floor, by the architecture page. `gammaray` is the ground floor of all three packages."""

FACADES = {"gammaray/__init__.py", "gammaray/__main__.py"}
"""Offer what lies above them under a shorter name; no other file of ours imports them for that."""

MAX_FILES = 14
"""Modules in a room: more of them are two rooms."""

ONLY_IN = {
    "ray": {"orchestrator/app.py", "orchestrator/launcher/cluster.py", "services/serve/app.py"},
    "redis": {
        "gammaray/deploy/redis_connection.py",
        "orchestrator/launcher/redis_server.py",
        "orchestrator/storage/client.py",
        "orchestrator/storage/registry.py",
        "orchestrator/storage/session_store.py",
    },
}
"""Package -> the only files that may import it."""

NEVER_IN = {
    "gammaray": {"fastapi", "numpy", "orchestrator", "ray", "services", "torch", "transformers"},
    "orchestrator": {"services", "torch"},
    "services": {"fastapi", "orchestrator"},
    "orchestrator/cycle": {"ray", "redis"},
    "orchestrator/cycle/run.py": {"grpc"},
    "orchestrator/control": {"grpc", "ray", "redis"},
}
"""Folder or file -> packages it must not import."""

PACKAGES = {
    ("gammaray/audit",): {"gammaray/cli/commands/audit.py"},
    ("services/train", "services/train/answers", "services/train/live"): set(),
    ("services/vllm",): {"services/engines/vllm.py"},
    ("gammaray/learning", "services/learning", "services/train/live"): {
        "gammaray/cli/commands/train.py",
        "services/own/head_loading.py",
        "services/vllm/loading.py",
    },
}
"""Rooms that could be packages of their own -> the only files of the others that import them: the way in."""

LAUNCHER = {"orchestrator/launcher/cluster.py", "orchestrator/launcher/preflight.py"}
"""Starts both sides, and so may name `services` to `import_module`; no library code imports it."""


def imported(path: str, source: str) -> Iterator[str]:
    """Yield the full name of every absolute import: of a module, or of a name in one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = getattr(node.func, "attr", getattr(node.func, "id", ""))
            name = str(node.args[0].value) if function in ("import_module", "__import__") else ""
            if name and not (name.startswith("services.") and path in LAUNCHER):
                yield name


def violations(path: str, source: str) -> list[str]:
    """Return what the file at `path` (relative, with slashes) must not import but does."""
    found = []
    for name in sorted({name.partition(".")[0] for name in imported(path, source)}):
        if path not in ONLY_IN.get(name, {path}):
            found.append(f"{path} imports {name}, which only {sorted(ONLY_IN[name])} may")
        for place, banned in NEVER_IN.items():
            if name in banned and (path == place or path.startswith(f"{place}/")):
                found.append(f"{path} imports {name}, which nothing in {place} may")
    return found


def room_of(path: str) -> str:
    return path.rpartition("/")[0]


def files_imported(path: str, source: str, modules: Mapping[str, str]) -> set[str]:
    """Return the files of ours that one imports; `modules` maps dotted names to files."""
    found = set()
    for name in imported(path, source):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and modules[name] not in (path, *FACADES):
            found.add(modules[name])
    return found


def climbs(path: str, targets: set[str]) -> list[str]:
    """Return the imports of a file that do not go to its own room or to a lower floor."""
    room = room_of(path)
    return [
        f"{path} (floor {FLOORS[room]}) imports {target} (floor {FLOORS[room_of(target)]})"
        for target in sorted(targets)
        if room_of(target) != room and FLOORS[room_of(target)] >= FLOORS[room] and path not in FACADES
    ]


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the files of one circle of imports, empty without any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def sources():
    """Path -> text of every module of ours, generated ones aside."""
    paths = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    return {path: text for path, text in texts.items() if not path.startswith("gammaray/v1/")}


@pytest.fixture(scope="module")
def graph(sources):
    """Path -> the files of ours that it imports."""
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    return {path: files_imported(path, text, modules) for path, text in sources.items()}


def test_imports_of_every_file_are_allowed(sources):
    assert [violation for path, text in sources.items() for violation in violations(path, text)] == []


def test_floors_are_those_of_the_rooms_that_exist(sources):
    assert set(FLOORS) == {room_of(path) for path in sources}
    assert all(link == room for _, room, link in ROWS)
    assert len(ROWS) == len(FLOORS)
    assert set().union(*ONLY_IN.values()) <= sources.keys()


def test_imports_go_to_the_own_room_or_to_lower_floors(graph):
    assert [climb for path, targets in graph.items() for climb in climbs(path, targets)] == []


@pytest.mark.parametrize("rooms", PACKAGES, ids=lambda rooms: rooms[0])
def test_the_core_imports_a_package_by_one_way_in(graph, rooms):
    importers = {
        path
        for path, targets in graph.items()
        if room_of(path) not in rooms and any(room_of(target) in rooms for target in targets)
    }
    assert importers == PACKAGES[rooms]


def test_no_file_imports_itself_by_way_of_others(graph):
    assert circle({path: targets for path, targets in graph.items() if path not in FACADES}) == []


def test_rooms_are_small(sources):
    sizes = {room: sum(room_of(path) == room for path in sources) for room in FLOORS}
    assert {room: size for room, size in sizes.items() if size > MAX_FILES} == {}


def test_planted_violations_are_caught():
    planted = "def f():\n    from redis.asyncio import Redis\nif TYPE_CHECKING:\n    import grpc.aio"
    assert len(violations("orchestrator/cycle/run.py", planted)) == 3
    assert violations("orchestrator/launcher/cluster.py", "import_module('services.serve.app')") == []
    assert climbs(
        "orchestrator/cycle/run.py", {"orchestrator/workers/pool.py", "orchestrator/cycle/types.py"}
    )
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
