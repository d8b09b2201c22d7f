"""LoRA adapters in PEFT's format: what is read of them before vLLM loads them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open

from gammaray.demo_pair import is_missing
from gammaray.errors import InvalidArgumentError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as the largest rank."""

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_RANK_AXES = {"lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1}
"""Axis of a tensor that is as long as its module's rank, by the part of its name that says so."""


def adapter_error(name: str, directory: str, reason: str) -> InvalidArgumentError:
    allowed = f"a LoRA adapter of the target in PEFT's format: {' '.join(reason.split())}"
    return InvalidArgumentError("lora", f"{name}={directory}", allowed)


def max_rank(directories: Mapping[str, str]) -> int:
    """Return the setting of vLLM that covers the largest rank of the adapters.

    InvalidArgumentError if one does not exist, cannot be read or is of another kind, or a tensor has a rank
    that its configuration does not name, by which vLLM scales the adapter.
    """
    largest = 1
    for name, directory in directories.items():
        if is_missing(directory):
            raise adapter_error(name, directory, "the directory does not exist")
        try:
            stored = json.loads(stored_file(directory, _CONFIG).read_text())
            kind, ranks = stored["peft_type"], {int(stored["r"])}
            ranks |= set(map(int, (stored.get("rank_pattern") or {}).values()))
        except (AttributeError, OSError, ValueError, KeyError, TypeError) as error:
            reason = f"{_CONFIG} cannot be read ({type(error).__name__}: {error})"
            raise adapter_error(name, directory, reason) from error
        most, rank = max(ranks), " or ".join(map(str, sorted(ranks)))
        if kind != "LORA" or min(ranks) < 1 or most > RANKS[-1]:
            raise adapter_error(name, directory, f"its kind is {kind}, its rank {rank}, at most {RANKS[-1]}")
        for tensor, shape in _shapes(name, directory).items():
            axis = _RANK_AXES.get(tensor.removesuffix(".weight").rpartition(".")[2])
            if axis is not None and len(shape) == 2 and shape[axis] not in ranks:
                reason = f"{tensor} has rank {shape[axis]}, {_CONFIG} says {rank}"
                raise adapter_error(name, directory, reason)
        largest = max(largest, most)
    return next(rank for rank in RANKS if rank >= largest)


def _shapes(name: str, directory: str) -> dict[str, Sequence[int]]:
    path = _weights(directory)
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy") as file:
                return {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        import torch  # slow, and rarely needed

        tensors = torch.load(path, "meta", mmap=True, weights_only=True)
        return {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    except Exception as error:  # torch and safetensors raise different ones
        raise adapter_error(name, directory, f"{path.name} cannot be read: {error}") from error


def adapter_sha256(directory: str) -> str:
    """Return the fingerprint of an adapter that has been loaded."""
    digest = hashlib.sha256(stored_file(directory, _CONFIG).read_bytes())
    digest.update(_weights(directory).read_bytes())
    return digest.hexdigest()


def _weights(directory: str) -> Path:
    """Return the file with an adapter's tensors that vLLM reads, the first one if none exists."""
    paths = []
    for name in _WEIGHTS:
        with suppress(FileNotFoundError):
            paths.append(stored_file(directory, name))
    return next((path for path in paths if path.is_file()), Path(directory) / _WEIGHTS[0])


def stored_file(directory: str, name: str) -> Path:
    """Return a file of a model or adapter, from the hub's cache if need be; FileNotFoundError if absent."""
    path = Path(directory) / name
    if path.is_file() or Path(directory).exists():
        return path
    cached = try_to_load_from_cache(directory, name)
    if not isinstance(cached, str):
        raise FileNotFoundError(f"{path} does not exist")
    return Path(cached)
