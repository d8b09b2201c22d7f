"""An environment per client, of pip or of npm: a joint one cannot be resolved."""

from __future__ import annotations

import hashlib
import json
import shutil
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
        OSError: The client needs npm, which is not installed.
        subprocess.CalledProcessError: pip or npm failed; what it printed is on stderr.
    """
    requirements = _requirements(client)
    wanted = hashlib.sha256(requirements.read_bytes()).hexdigest()
    folder = environments / client
    stamp, is_npm = folder / ".requirements.sha256", requirements.suffix == ".json"
    binaries = folder / "node_modules" / ".bin" if is_npm else folder / "bin"
    if stamp.is_file() and stamp.read_text() == wanted:
        return binaries
    print(f"installing {client} into {folder}", file=sys.stderr, flush=True)
    if is_npm:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(requirements, folder / "package.json")
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", folder]
    else:
        venv.create(folder, with_pip=True)
        pip = [binaries / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        command = [*pip, "-r", requirements]
    subprocess.run(command, check=True, timeout=_INSTALL_TIMEOUT_S, stdout=sys.stderr)
    stamp.write_text(wanted)
    return binaries


def pinned_version(client: str) -> str:
    """Return the version of a client that its requirements pin."""
    name, requirements = client.replace("-", "_"), _requirements(client)
    if requirements.suffix == ".json":
        (version,) = json.loads(requirements.read_text())["dependencies"].values()
        return str(version)
    for line in requirements.read_text().splitlines():
        package, _, version = line.partition("==")
        if package.lower().replace("-", "_") == name:
            return version
    raise LookupError(f"{client} is not pinned in its own requirements")


def _requirements(client: str) -> Path:
    """Return a client's requirements: those of npm, if there are any, else those of pip."""
    of_npm = REQUIREMENTS / f"{client}.json"
    return of_npm if of_npm.is_file() else REQUIREMENTS / f"{client}.txt"
