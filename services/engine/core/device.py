"""What a device can do, and which errors lose it; the seam at which tests stand in for a card.

Some errors of CUDA stick: after a device-side assertion or an illegal memory access every later call of the
process fails. So does every collective after an error of NCCL. Such an engine is lost, and its worker must
leave and be replaced.
"""

from __future__ import annotations

import torch

from services.engine.core.errors import EngineLostError

_FAULTS = (
    "CUDA error",
    "CUDA driver error",
    "device-side assert",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "NCCL error",
    "NCCL Error",
)
# Errors of one call, after which the device continues.
_ORDINARY = ("out of memory", "invalid argument", "invalid configuration argument")


def device_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, such as (9, 0); None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_bfloat16(kind: str) -> bool:
    """Whether devices of a kind, such as "cpu", have products of bfloat16; other CPUs convert first."""
    found: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return kind != "cpu" or bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def wait_for_device(device: torch.device) -> None:
    """Wait until a CUDA device has done what was queued; RuntimeError if some of it failed."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def raise_if_lost(error: BaseException) -> None:
    """Raise EngineLostError if an error or its cause leaves the device unusable for this process."""
    cause: BaseException | None = error
    while cause is not None:
        if _is_fault(cause):
            first_line = (str(cause).strip().splitlines() or [""])[0]
            raise EngineLostError(f"{type(cause).__name__}: {first_line}") from error
        cause = cause.__cause__


def _is_fault(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error)
    if any(part in text for part in _ORDINARY):
        return False
    dist_error = torch.distributed.DistError
    kinds = (dist_error, getattr(torch, "AcceleratorError", dist_error))  # torch 2.7 lacks the latter
    return isinstance(error, kinds) or any(part in text for part in _FAULTS)
