#!/usr/bin/env python3
"""Runs a command as on a machine without the programs of tests/programs.py.

    python3 .ci/bare.py COMMAND [ARGUMENT ...]

Each folder of the PATH that has one of them is replaced by a folder of links to everything else in it. PYTHON
is set to no such link, as .venv, which the Makefile makes from it, outlives them. Prints which programs are
hidden; exits with the command's status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.programs import PROGRAMS


def main(command: Sequence[str]) -> int:
    """Run a command; return its exit status."""
    hidden = [name for program in PROGRAMS.values() for name in program.names]
    found, folders = [], list[str]()
    with tempfile.TemporaryDirectory(prefix="bare-") as root:
        for number, folder in enumerate(map(Path.absolute, map(Path, os.get_exec_path()))):
            if present := [folder / name for name in hidden if os.path.lexists(folder / name)]:
                found += map(str, present)
                folder = without(folder, hidden, Path(root, str(number)))
            folders.append(str(folder))
        print(f"bare: hidden: {', '.join(found) or 'nothing, no program is installed'}", flush=True)
        environment = {"PYTHON": sys.executable, **os.environ, "PATH": os.pathsep.join(folders)}
        return subprocess.run(["/usr/bin/env", *command], env=environment, check=False).returncode


def without(folder: Path, names: Sequence[str], copy: Path) -> Path:
    """Fill a new folder with links to what a folder has, but for some names."""
    copy.mkdir()
    for entry in folder.iterdir():
        if entry.name not in names:
            (copy / entry.name).symlink_to(entry)
    return copy


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
