"""Counts the CUDA devices of this machine as torch would, without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gammaray.errors import InvalidArgumentError

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


@dataclass(frozen=True)
class CudaDevices:
    """The CUDA devices that a worker can use.

    Args:
        count: Devices that torch can use.
        reason: Why there are none; empty if there are some.
    """

    count: int
    reason: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """Build variant of torch.

    Args:
        version: Version of torch.
        cuda: Version of CUDA; None: built without.
        hip: Version of ROCm, whose devices torch also calls CUDA devices; None: built without.
    """

    version: str
    cuda: str | None
    hip: str | None


def cuda_devices(driver: str = _DRIVER, build: TorchBuild | None = None) -> CudaDevices | None:
    """Return the devices visible to this process; None if they cannot be counted without torch.

    Respects `CUDA_VISIBLE_DEVICES`, as torch does.

    Args:
        driver: Shared library of the CUDA driver.
        build: Build variant of torch; None: that of the installed torch.
    """
    build = build or torch_build()
    if build is None or build.hip is not None:
        return None
    if build.cuda is None:
        return CudaDevices(0, f"torch {build.version} is built without CUDA")
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return CudaDevices(0, f"there is no NVIDIA driver ({driver} cannot be loaded)")
    if (status := library.cuInit(0)) != _SUCCESS:
        return CudaDevices(0, f"the NVIDIA driver shows no device (cuInit returns {status})")
    version, count = ctypes.c_int(), ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) == _SUCCESS:
        newest, needed = version.value // 1000, int(build.cuda.partition(".")[0])
        if newest < needed:
            reason = f"the NVIDIA driver is for CUDA {newest}, torch {build.version} needs CUDA {needed}"
            return CudaDevices(0, reason)
    if (status := library.cuDeviceGetCount(ctypes.byref(count))) != _SUCCESS or count.value < 1:
        return CudaDevices(0, "the NVIDIA driver shows no device")
    return CudaDevices(count.value)


def check_device(device: str, devices: CudaDevices | None = None) -> None:
    """Check that there is a CUDA device if the workers' device is cuda.

    Args:
        device: The workers' `device` setting.
        devices: The available devices; None: count them.

    Raises:
        InvalidArgumentError: There is none; the message says why.
    """
    if device != "cuda":
        return
    found = devices or cuda_devices()
    if found is not None and not found.count:
        raise InvalidArgumentError("device", device, f"auto or cpu: {found.reason}")


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Return the build variant of torch, read from its version.py; None if it cannot be determined.

    Args:
        folder: Folder of the package; None: the installed one.
    """
    if folder is None:
        spec = find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return None
        folder = Path(next(iter(spec.submodule_search_locations)))
    try:
        text = (folder / "version.py").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(\w+)(?:: [^=\n]+)? = '([^']*)'", text, re.MULTILINE))
    if "__version__" not in found or not re.search(r"^cuda\b", text, re.MULTILINE):
        return None
    return TorchBuild(found["__version__"], found.get("cuda"), found.get("hip"))
