"""The count of CUDA devices: a library stands in for the driver."""

import shutil
import subprocess

import pytest

from gammaray.deploy.gpus import CudaDevices, check_device, cuda_devices
from gammaray.errors import InvalidArgumentError

CUDA = "2.13.0+cu130"
DRIVER = """
int cuInit(unsigned flags) { return %(init)s; }
int cuDeviceGetCount(int *count) { *count = %(count)s; return 0; }
"""


@pytest.fixture
def driver(tmp_path):
    """Return a function that builds a driver with given answers."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    def build(**answers):
        source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
        source.write_text(DRIVER % {"init": 0, "count": 1, **answers})
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
    ],
)
def test_driver_without_a_usable_device_is_reported(driver, answers, reason):
    found = cuda_devices(driver(**answers), CUDA)
    assert found.count == 0
    assert reason in found.reason
    with pytest.raises(InvalidArgumentError, match=f"device: got cuda, allowed: auto or cpu: .*{reason}"):
        check_device("cuda", found)
    check_device("auto", found)


def test_machine_without_a_driver_has_no_device(tmp_path):
    found = cuda_devices(str(tmp_path / "missing.so"), CUDA)
    assert found.count == 0
    assert "no NVIDIA driver" in found.reason


def test_torch_without_cuda_has_no_device(driver):
    assert "built without CUDA" in cuda_devices(driver(), "2.13.0+cpu").reason


def test_devices_of_rocm_are_not_counted(driver):
    assert cuda_devices(driver(), "2.13.0+rocm6.4") is None


def test_count_is_that_of_torch():
    torch = pytest.importorskip("torch")
    found = cuda_devices()
    assert found.count == torch.cuda.device_count()
