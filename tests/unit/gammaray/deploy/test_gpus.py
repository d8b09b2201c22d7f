"""The count of CUDA devices: a library stands in for the driver, a text for torch's version.py."""

import shutil
import subprocess

import pytest

from gammaray.deploy.gpus import (
    CudaDevices,
    TorchBuild,
    check_device,
    cuda_devices,
    torch_build,
)
from gammaray.errors import InvalidArgumentError

CUDA = TorchBuild("2.13.0+cu130", "13.0", None)
DRIVER = """
int cuInit(unsigned flags) { return %(init)s; }
int cuDriverGetVersion(int *version) { *version = %(version)s; return 0; }
int cuDeviceGetCount(int *count) { *count = %(count)s; return 0; }
"""


@pytest.fixture
def driver(tmp_path):
    """Return a function that builds a driver with given answers."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def build(**answers):
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER % {"init": 0, "version": 13000, "count": 1, **answers})
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=100)
        return str(library)

    return build


def test_devices_are_those_of_the_driver(driver):
    found = cuda_devices(driver(count=4), CUDA)
    assert found == CudaDevices(4)
    check_device("cuda", found)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"init": 100}, "cuInit returns 100"),
        ({"count": 0}, "shows no device"),
        ({"version": 12080}, "is for CUDA 12, torch 2.13.0+cu130 needs CUDA 13"),
    ],
)
def test_driver_without_a_usable_device_is_reported(driver, answers, reason):
    found = cuda_devices(driver(**answers), CUDA)
    assert found.count == 0
    assert reason in found.reason
    with pytest.raises(
        InvalidArgumentError, match=f"device: got cuda, allowed: auto or cpu: .*{reason}".replace("+", r"\+")
    ):
        check_device("cuda", found)
    check_device("auto", found)


def test_machine_without_a_driver_has_no_device(tmp_path):
    found = cuda_devices(str(tmp_path / "missing.so"), CUDA)
    assert found.count == 0
    assert "no NVIDIA driver" in found.reason


def test_torch_without_cuda_has_no_device(driver):
    assert "built without CUDA" in cuda_devices(driver(), TorchBuild("2.13.0+cpu", None, None)).reason


def test_devices_of_rocm_are_not_counted(driver):
    assert cuda_devices(driver(), TorchBuild("2.13.0", None, "6.4")) is None


def test_count_is_that_of_torch():
    torch = pytest.importorskip("torch")
    found = cuda_devices()
    assert found.count == torch.cuda.device_count()
    assert torch_build() == TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


def test_version_file_without_a_version_counts_as_no_cuda_build(tmp_path):
    assert torch_build(tmp_path) is None
    (tmp_path / "version.py").write_text("__version__ = '9.0'\n")
    assert torch_build(tmp_path) is None
