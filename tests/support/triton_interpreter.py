"""Runs Triton's kernels without a GPU: its interpreter, and a driver of a backend "cpu", as vLLM asks for.

vLLM's V2 model runner then works whole on its CPU build. Import this before vLLM.
"""

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
import triton.backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import interpreter
from triton.runtime.driver import driver


class CpuDriver(DriverBase):
    """What the interpreter and vLLM ask a driver for."""

    def __init__(self) -> None:
        """Load nothing."""

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> None:
        return None


def _with_mask(access, place):
    """Let a mask of integers pass, as where Triton compiles."""

    @functools.wraps(access)
    def masked(builder, *handles):
        mask = handles[place]
        mask.data = mask.data.astype(bool)
        return access(builder, *handles)

    return masked


BUILDER = interpreter.InterpreterBuilder
BUILDER.create_masked_load = _with_mask(BUILDER.create_masked_load, 1)
BUILDER.create_masked_store = _with_mask(BUILDER.create_masked_store, 2)
triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=CpuDriver)
driver.set_active(CpuDriver())
