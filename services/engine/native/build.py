"""Compiles the kernel: one shared library for each instruction set.

Workers compile the library they need when they first load a model, see `services.engine.native.library`.
Image builds compile all libraries:

    python -m services.engine.native.build            # next to kernel.c
    python -m services.engine.native.build --out DIR

It needs the standard library and a C compiler: `$CC`, else cc, gcc or clang.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent
SOURCES = ("kernel.c", "attention.h", "draws.h", "integers.h", "pairs.h", "threads.h", "tiles.h")
BASELINE, VNNI = "baseline", "x86-64-v4-vnni"
BF16, AMX = "x86-64-v4-bf16", "x86-64-v4-amx"
TIMEOUT_S = 300

# These affect the order of floating-point operations: other flags would change results in the last bits.
_FLAGS = ("-std=gnu11", "-O3", "-DNDEBUG", "-fwrapv", "-ffp-contract=fast", "-fvisibility=hidden")
_LIBRARY_FLAGS = ("-fPIC", "-shared", "-pthread")


def _variants() -> dict[str, tuple[str, ...]]:
    variants: dict[str, tuple[str, ...]] = {BASELINE: ()}
    if platform.machine() in ("x86_64", "AMD64"):
        variants["x86-64-v3"] = ("-march=x86-64-v3",)
        variants["x86-64-v4"] = ("-march=x86-64-v4", "-mprefer-vector-width=512")
        variants[VNNI] = (*variants["x86-64-v4"], "-mavx512vnni")
        variants[BF16] = (*variants[VNNI], "-mavx512bf16")
        variants[AMX] = (*variants[BF16], "-mamx-tile", "-mamx-bf16", "-mamx-int8")
    return variants


VARIANTS = _variants()
"""Instruction sets of this architecture by name, and the compiler's options for each."""


class KernelBuildError(Exception):
    """The kernel could not be compiled; the message says why."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler: its command, with the options in `$CC`, and the first line of its `--version` output."""

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler | None:
    """Return the C compiler of this environment, None if there is none."""
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(command[0])
        if path is None:
            continue
        try:
            result = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return Compiler((path, *command[1:]), result.stdout.partition("\n")[0])
    return None


def find_library(folder: Path, variant: str, compiler: Compiler | None = None) -> Path | None:
    """Return the library of a variant of `VARIANTS` in a folder; None if absent.

    It was built from these sources with these flags, by any compiler if `compiler` is None.
    """
    if compiler is not None:
        path = folder / _file_name(variant, compiler)
        return path if path.is_file() else None
    return next(iter(sorted(folder.glob(f"{_stem(variant)}-*.so"))), None)


def compile_library(folder: Path, variant: str, compiler: Compiler) -> Path:
    """Compile a variant into a folder, atomically, and return the library; KernelBuildError if that fails."""
    path = folder / _file_name(variant, compiler)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            built = Path(scratch) / path.name
            options = [*_FLAGS, *VARIANTS[variant], *_LIBRARY_FLAGS]
            subprocess.run(
                [*compiler.command, *options, str(SOURCE_DIR / SOURCES[0]), "-o", str(built), "-lm"],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=True,
            )
            built.replace(path)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise KernelBuildError(f"{compiler.command[0]} failed for {variant}: {last}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{variant} cannot be compiled into {folder}: {error}") from error
    return path


def _stem(variant: str) -> str:
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS, VARIANTS[variant])).encode())
    for name in SOURCES:
        digest.update((SOURCE_DIR / name).read_bytes())
    return f"kernel-{variant}-{digest.hexdigest()[:16]}"


def _file_name(variant: str, compiler: Compiler) -> str:
    identity = repr((compiler.command[1:], compiler.version))
    return f"{_stem(variant)}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.so"


def main() -> int:
    """Compile every instruction set of this architecture."""
    parser = argparse.ArgumentParser("services.engine.native.build", description="Compile the CPU kernel.")
    parser.add_argument("--out", type=Path, default=SOURCE_DIR, help="directory of the libraries")
    folder = parser.parse_args().out
    compiler = find_compiler()
    if compiler is None:
        print("no C compiler: set CC, or install cc, gcc or clang", file=sys.stderr)
        return 1
    for variant in VARIANTS:
        try:
            print(compile_library(folder, variant, compiler))
        except KernelBuildError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
