"""Provenance of measurements: the header of every result file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from gammaray.program.files import replacing

_REPOSITORY = Path(__file__).parents[2]
_PACKAGES = ("gammaray", "torch", "transformers", "tokenizers", "ray", "grpcio", "protobuf", "redis")
_SECRET = "--api-key"


def provenance() -> dict[str, Any]:
    """Return commit, command, hardware, versions and date of the running program.

    `git.dirty` is true when tracked or new files other than results differ from the commit; `git` is None
    outside a checkout of gammaray.
    """
    return {
        "date_utc": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _command(sys.argv),
        "git": _git(),
        "hardware": _hardware(),
        "versions": _versions(),
    }


def write_result(name: str, result: dict[str, Any], out: Path) -> Path:
    """Write `result` with its provenance as JSON to `out`, and return that path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": name, "provenance": provenance(), **result}, indent=1)
    with replacing(out) as part:  # a killed run leaves no partial result
        part.write_text(text + "\n")
    return out


def _command(argv: Sequence[str]) -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name == "__main__":  # a folder was run
        program = "python " + "/".join(Path(argv[0]).parts[-2:])
    elif spec is not None:
        program = f"python -m {spec.name.removesuffix('.__main__')}"
    else:
        program = Path(argv[0]).name
    shown = [program]
    for previous, argument in pairwise(argv):
        if previous == _SECRET:
            argument = "..."
        elif argument.startswith(f"{_SECRET}="):
            argument = f"{_SECRET}=..."
        shown.append(argument)
    return " ".join(shown)


def _git() -> dict[str, Any] | None:
    # An installed gammaray may lie inside the checkout of another project, whose commit is irrelevant.
    if _run("git", "ls-files", "--error-unmatch", __file__) is None:
        return None
    changes = _run("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"sha": _run("git", "rev-parse", "HEAD"), "dirty": bool(changes)}


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=_REPOSITORY, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": _gpu_name(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu_name() -> str | None:
    names = _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines()[0] if names else None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
