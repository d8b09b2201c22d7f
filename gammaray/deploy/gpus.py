"""Counts the CUDA devices of this machine without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib import metadata

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


def cuda_devices(driver: str = _DRIVER, version: str | None = None) -> CudaDevices | None:
    """Return the devices visible to this process; None if they cannot be counted without torch.

    Respects `CUDA_VISIBLE_DEVICES`, as torch does.

    Args:
        driver: Shared library of the CUDA driver.
        version: Version of torch, with its build variant; None: that of the installed torch.
    """
    try:
        version = version or metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    if "+rocm" in version:
        return None
    if version.endswith("+cpu"):
        return CudaDevices(0, f"torch {version} is built without CUDA")
    try:
        library = ctypes.CDLL(driver)
    except OSError:
        return CudaDevices(0, f"there is no NVIDIA driver ({driver} cannot be loaded)")
    if (status := library.cuInit(0)) != _SUCCESS:
        return CudaDevices(0, f"the NVIDIA driver shows no device (cuInit returns {status})")
    count = ctypes.c_int()
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
