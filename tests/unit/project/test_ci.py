"""CI begins as on a bare machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[3]
NAMES = [name for program in PROGRAMS.values() for name in program.names]
WAIT_S = 120.0

RECORDING_MAKE = """#!/bin/sh
for name in %s; do command -v $name > /dev/null && seen="$seen $name"; done
echo "make $*:$seen" >> "$RECORD"
"""


@pytest.fixture
def machine(tmp_path):
    """Environment of a machine where all programs are installed, and where `make` records its calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "make").write_text(RECORDING_MAKE % " ".join(NAMES))
    (folder / "other").symlink_to("/bin/true")
    for name in NAMES:
        (folder / name).symlink_to("/bin/true")
    (folder / "make").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(tmp_path / "record")}


def test_ci_installs_and_tests_without_the_programs_first(machine):
    done = subprocess.run(
        [ROOT / ".ci/run"], env=machine, check=True, timeout=WAIT_S, capture_output=True, text=True
    )
    (hidden,) = [line for line in done.stdout.splitlines() if line.startswith("bare: hidden: ")]
    assert all(f"/bin/{name}" in hidden for name in NAMES)
    first, *rest = Path(machine["RECORD"]).read_text().splitlines()
    assert first == "make install test:"
    words = [word for line in rest for word in line.removeprefix("make ").partition(":")[0].split()]
    targets = [word for word in words if not word.startswith("-")]
    assert targets == ["test-programs", "lint", "vllm", "test-needs", "test-more", "test-vllm"]
    assert all(line.endswith(f": {' '.join(NAMES)}") for line in rest)


def test_make_looks_for_tests_that_need_programs_where_they_are():
    """`make test-needs` collects some folders only; other targets run those of whole clusters."""
    (command,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if '-m "needs and' in line]
    folders = [ROOT / word for word in command.split() if word.startswith("tests/")]
    others = [ROOT / "tests" / name for name in ("e2e", "hosts", "unit/project")]
    for path in (ROOT / "tests").rglob("test_*.py"):
        if "mark.needs(" in path.read_text() or "EACH_SERVER" in path.read_text():
            assert any(path.is_relative_to(folder) for folder in (*folders, *others)), path


def test_bare_machine_keeps_other_programs_python_and_the_status(machine):
    script = 'other && echo "$PYTHON" && exit 7'
    command = [sys.executable, ROOT / ".ci/bare.py", "sh", "-c", script]
    done = subprocess.run(command, env=machine, check=False, timeout=WAIT_S, capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1] == machine.get("PYTHON", sys.executable)
