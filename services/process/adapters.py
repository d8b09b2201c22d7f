"""LoRA adapters in PEFT's format: what is read of them before vLLM loads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from gammaray.errors import InvalidArgumentError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank."""

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def adapter_error(name: str, directory: str, reason: str) -> InvalidArgumentError:
    """Return the error for an adapter that cannot be served."""
    allowed = f"a LoRA adapter of the target in PEFT's format: {' '.join(reason.split())}"
    return InvalidArgumentError("lora", f"{name}={directory}", allowed)


def max_rank(directories: Mapping[str, str]) -> int:
    """Return the setting of vLLM that covers the largest rank of the adapters, whose kind it checks."""
    largest = 1
    for name, directory in directories.items():
        try:
            stored = json.loads(_file(directory, _CONFIG).read_text())
            kind, rank = stored["peft_type"], int(stored["r"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{_CONFIG} cannot be read ({type(error).__name__}: {error})"
            raise adapter_error(name, directory, reason) from error
        if kind != "LORA" or not 1 <= rank <= RANKS[-1]:
            raise adapter_error(name, directory, f"its kind is {kind}, its rank {rank}, at most {RANKS[-1]}")
        largest = max(largest, rank)
    return next(rank for rank in RANKS if rank >= largest)


def adapter_sha256(directory: str) -> str:
    """Return the fingerprint of an adapter that has been loaded."""
    digest = hashlib.sha256(_file(directory, _CONFIG).read_bytes())
    for name in _WEIGHTS:
        try:
            digest.update(_file(directory, name).read_bytes())
            break
        except FileNotFoundError:
            continue
    return digest.hexdigest()


def _file(directory: str, name: str) -> Path:
    path = Path(directory) / name
    if path.is_file() or Path(directory).exists():
        return path
    found = try_to_load_from_cache(directory, name)
    if not isinstance(found, str):
        raise FileNotFoundError(f"{path} does not exist")
    return Path(found)
