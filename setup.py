"""The compiled kernel; everything else is in pyproject.toml.

One library per instruction set, chosen when a model is loaded. All are optional: without a C compiler the
engine takes its general path, several times slower on a CPU and of no consequence on a GPU.
"""

import platform

from setuptools import Extension, setup

SOURCE = "services/engine/native/kernel.c"
HEADER = "services/engine/native/attention.h"
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fvisibility=hidden"]
VARIANTS = {"_kernel": []}
if platform.machine() in ("x86_64", "AMD64"):
    VARIANTS["_kernel_v3"] = ["-march=x86-64-v3"]
    VARIANTS["_kernel_v4"] = ["-march=x86-64-v4", "-mprefer-vector-width=512"]

setup(
    ext_modules=[
        Extension(
            f"services.engine.native.{name}",
            [SOURCE],
            depends=[HEADER],
            extra_compile_args=[*FLAGS, *flags],
            libraries=["m"],
            optional=True,
        )
        for name, flags in VARIANTS.items()
    ]
)
