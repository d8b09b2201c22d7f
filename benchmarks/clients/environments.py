"""A virtual environment per client: a joint one cannot be resolved."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = Path(__file__).parents[2] / "build" / "clients"

_INSTALL_TIMEOUT_S = 3600.0


def ensure_environment(client: str, environments: Path = ENVIRONMENTS) -> Path:
    """Install a client with its pinned requirements, unless that was done, and return its `bin` folder.

    Raises:
        subprocess.CalledProcessError: pip failed; what it printed is on stderr.
    """
    requirements = REQUIREMENTS / f"{client}.txt"
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = environments / client
    stamp, binaries = folder / ".requirements.sha256", folder / "bin"
    if stamp.is_file() and stamp.read_text() == wanted:
        return binaries
    print(f"installing {client} into {folder}", file=sys.stderr, flush=True)
    venv.create(folder, with_pip=True)
    subprocess.run(
        [
            binaries / "python",
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "-r",
            requirements,
        ],
        check=True,
        timeout=_INSTALL_TIMEOUT_S,
        stdout=sys.stderr,
    )
    stamp.write_text(wanted)
    return binaries


def pinned_version(client: str) -> str:
    """Return the version of a client that its requirements pin."""
    name = client.replace("-", "_")
    for line in (REQUIREMENTS / f"{client}.txt").read_text().splitlines():
        package, _, version = line.partition("==")
        if package.lower().replace("-", "_") == name:
            return version
    raise LookupError(f"{client} is not pinned in its own requirements")
