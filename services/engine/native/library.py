"""Finds or compiles the kernel for this processor.

A library next to `kernel.c` is preferred (images contain one), then one in the cache folder; otherwise the
kernel is compiled into that folder, once for all processes of the machine. File names contain a hash of the
sources, flags and compiler, so that a change of any of them causes a recompilation.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from services.engine.native.bindings import declare
from services.engine.native.build import (
    AMX,
    BASELINE,
    BF16,
    SOURCE_DIR,
    TIMEOUT_S,
    VNNI,
    Compiler,
    KernelBuildError,
    compile_library,
    find_compiler,
    find_library,
)

_REQUEST_TILES = 158, 0x1023, 18
"""The system call arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA) of x86-64."""

_log = logging.getLogger(__name__)
_loaded: Kernel | None = None
_threads = 1


@dataclass(frozen=True)
class Kernel:
    library: ctypes.CDLL | None  # its functions; None without a kernel
    variant: str = ""  # the instruction set that it was compiled for; empty without a kernel
    reason: str = ""  # why there is no kernel; empty otherwise


def load_kernel() -> Kernel:
    """Return the kernel for this processor; the first call finds or compiles it."""
    global _loaded
    if _loaded is None:
        for variant in usable_variants():
            _loaded = open_kernel(variant)
            if _loaded.library is not None:
                break
            _log.warning("no CPU kernel for %s (%s)", variant, _loaded.reason)
    assert _loaded is not None
    return _loaded


def usable_variants() -> list[str]:
    """Return the variants that this processor can run, the fastest one first."""
    capability = torch.backends.cpu.get_cpu_capability()
    vectors = {"AVX512": ["x86-64-v4", "x86-64-v3"], "AVX2": ["x86-64-v3"]}.get(capability, [])
    if capability == "AVX512" and "avx512_vnni" in _processor_flags():
        vectors = [VNNI, *vectors]
        if "avx512_bf16" in _processor_flags():
            vectors = [*([AMX] if _has_tiles() else []), BF16, *vectors]
    return [*vectors, BASELINE]


@functools.cache
def _processor_flags() -> frozenset[str]:
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


@functools.cache
def _has_tiles() -> bool:
    """Whether the processor has AMX; Linux gives its tiles to all threads of a process that asks."""
    has_flags = {"amx_bf16", "amx_int8"} <= _processor_flags()
    return has_flags and ctypes.CDLL(None).syscall(*map(ctypes.c_long, _REQUEST_TILES)) == 0


def use_threads(count: int) -> None:
    """Let the kernel compute on `count` threads of this process, and torch on one.

    After an operation torch's threads spin for milliseconds before they sleep, on cores that the kernel's
    threads need; torch computes little apart from the kernel.
    """
    global _threads
    _threads = count
    torch.set_num_threads(1)


def kernel_threads() -> int:
    """Return the number of threads that the kernel computes on, see `use_threads`."""
    return _threads


def open_kernel(variant: str, cache_dir: str = "") -> Kernel:
    """Find or compile a kernel in a folder; "": gammaray/kernel in the cache folder, see XDG_CACHE_HOME."""
    try:
        return Kernel(declare(ctypes.CDLL(str(_library(variant, cache_dir)))), variant)
    except KernelBuildError as error:
        return Kernel(None, reason=str(error))
    except OSError as error:
        return Kernel(None, reason=f"the library cannot be loaded: {error}")


def _library(variant: str, cache_dir: str) -> Path:
    shipped = find_library(SOURCE_DIR, variant)
    if shipped is not None:
        return shipped
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache_dir) if cache_dir else Path(base) / "gammaray" / "kernel"
    compiler = find_compiler()
    cached = find_library(folder, variant, compiler)
    if cached is not None:
        return cached
    if compiler is None:
        raise KernelBuildError("no C compiler")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Workers that start at the same time wait for the first one instead of compiling the same library.
        with FileLock(folder / f".{variant}.lock", timeout=2 * TIMEOUT_S):
            return find_library(folder, variant, compiler) or _compiled(folder, variant, compiler)
    except Timeout:
        raise KernelBuildError(f"another process has held {folder} for {2 * TIMEOUT_S} s") from None
    except OSError as error:
        private = Path(tempfile.mkdtemp(prefix="gammaray-kernel-"))
        _log.warning("failed to store compiled kernels in %s (%s): each start compiles again", folder, error)
        return _compiled(private, variant, compiler)


def _compiled(folder: Path, variant: str, compiler: Compiler) -> Path:
    _log.info("compiling the CPU kernel for %s with %s, once", variant, compiler.version)
    began = time.monotonic()
    path = compile_library(folder, variant, compiler)
    _log.info("compiled %s in %.1f s", path, time.monotonic() - began)
    return path


def top_k_tokens(scores: Tensor, count: int, temperature: float) -> list[tuple[int, float]]:
    """Return the tokens with the largest scores and their shares of sum exp(score / temperature), best first.

    Scores are [vocab_size], float32 or float64, -inf for masked tokens. The `count` is at most `MAX_GUESSES`
    of kernel.c and the size of the vocabulary, and the temperature above 0.
    """
    library = load_kernel().library if scores.is_cpu and scores.is_contiguous() else None
    if library is None:
        best, token_ids = scores.topk(min(count, scores.shape[0]))
        total = ((scores - best[0]) / temperature).exp_().sum()
        masses = ((best - best[0]) / temperature).exp_() / total
        return list(zip(token_ids.tolist(), masses.tolist(), strict=True))
    function = library.gr_guesses_float64 if scores.dtype == torch.float64 else library.gr_guesses_float32
    indices, shares = (ctypes.c_int32 * count)(), (ctypes.c_float * count)()
    num_tokens = function(scores.data_ptr(), scores.shape[0], count, temperature, indices, shares)
    return list(zip(indices[:num_tokens], shares[:num_tokens], strict=True))
