"""The CUDA devices of this machine, counted as torch would, without the seconds that its import takes."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gammaray.errors import InvalidArgumentError

__all__ = ["CudaDevices", "TorchBuild", "check_device", "cuda_devices", "torch_build"]

_DRIVER = "libcuda.so.1"
_SUCCESS = 0


@dataclass(frozen=True)
class CudaDevices:
    """What a worker would find.

    Args:
        count: Devices that torch can use.
        reason: Why there is none; empty where there are some.
    """

    count: int
    reason: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """What a torch was built for.

    Args:
        version: Its version.
        cuda: Version of CUDA; None: built without.
        hip: Version of ROCm, whose devices torch calls CUDA devices too; None: built without.
    """

    version: str
    cuda: str | None
    hip: str | None


def cuda_devices(driver: str = _DRIVER, build: TorchBuild | None = None) -> CudaDevices | None:
    """Return the devices that the driver shows to this process; None: they cannot be counted without torch.

    `CUDA_VISIBLE_DEVICES` counts, as it does for torch.

    Args:
        driver: Shared library of the CUDA driver.
        build: What torch was built for; None: the torch that is installed.
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
            told = f"the NVIDIA driver is for CUDA {newest}, torch {build.version} needs CUDA {needed}"
            return CudaDevices(0, told)
    if (status := library.cuDeviceGetCount(ctypes.byref(count))) != _SUCCESS or count.value < 1:
        return CudaDevices(0, "the NVIDIA driver shows no device")
    return CudaDevices(count.value)


def check_device(device: str, devices: CudaDevices | None = None) -> None:
    """Check that there is a CUDA device where workers are told to run on one.

    Args:
        device: Setting of the workers.
        devices: What there is; None: count them.

    Raises:
        InvalidArgumentError: There is none; tells why.
    """
    if device != "cuda":
        return
    found = devices or cuda_devices()
    if found is not None and not found.count:
        raise InvalidArgumentError("device", device, f"auto or cpu: {found.reason}")


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Return what torch was built for, by its file version.py; None where that does not tell.

    Args:
        folder: The package; None: the one that is installed.
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
    found = dict(re.findall(r"^(\w+)(?:: [^=]+)? = '([^']*)'", text, re.MULTILINE))
    if "__version__" not in found or not re.search(r"^cuda\b", text, re.MULTILINE):
        return None
    return TorchBuild(found["__version__"], found.get("cuda"), found.get("hip"))
