"""Tensors of checkpoints in safetensors, in a directory or on the hub, read one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from gammaray.errors import InvalidArgumentError
from gammaray.gguf import is_gguf
from services.engine.core.errors import UnsupportedModelError

__all__ = [
    "EMBEDDING",
    "check_shape",
    "checkpoint_folder",
    "read_tensor",
    "target_tensor",
    "tensor_names",
    "tensor_types",
]

EMBEDDING = "model.embed_tokens.weight"

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"


def target_tensor(name: str, target: str, suffixes: Sequence[str], what: str) -> Tensor:
    """Return one tensor of a target, of which nothing else is read.

    Args:
        name: The drafter that needs it.
        target: The target's directory or hub name; "" if it is not known.
        suffixes: Ends of the tensor's possible names, the preferred one first.
        what: What it is, for errors.

    Raises:
        InvalidArgumentError: The target is not known, or has no such tensor in safetensors.
    """
    allowed = f"a directory or hub name with safetensors, as {name} shares the target's {what}"
    if not target or is_gguf(target):
        raise InvalidArgumentError("target_model", target, allowed)
    try:
        folder = Path(target) if Path(target).is_dir() else _hub_folder(target)
        names = tensor_names(folder)
        for suffix in suffixes:
            for key in names:
                if key.endswith(suffix):
                    return read_tensor(target, folder, key)
    except (OSError, HFValidationError) as error:
        raise InvalidArgumentError("target_model", f"{target!r} ({error})", allowed) from error
    raise InvalidArgumentError("target_model", target, allowed)


def checkpoint_folder(name: str) -> Path | None:
    """Return the folder of a drafter; None for one on the hub without safetensors."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return _hub_folder(name)
    except (OSError, HFValidationError):
        return None


def _hub_folder(name: str) -> Path:
    """Return the folder in the hub's cache that has the index of a model's weights, or its only file."""
    index = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False)
    return Path(index or str(cached_file(name, _WEIGHTS))).parent


def tensor_names(folder: Path) -> list[str]:
    """Return the names of all tensors of a directory; none without safetensors."""
    if (folder / _WEIGHTS).is_file():
        with _opened(folder, folder / _WEIGHTS) as file:
            return list(file.keys())
    if (folder / _INDEX).is_file():
        return sorted(json.loads((folder / _INDEX).read_text())["weight_map"])
    return []


def tensor_types(folder: Path) -> dict[str, str]:
    """Return the type of each tensor of a directory, by safetensors' names; none without safetensors.

    Raises:
        UnsupportedModelError: A file is missing, truncated or damaged.
    """
    files = {_file_of(folder, key) for key in tensor_names(folder)}
    types = {}
    for path in files:
        with _opened(folder, path) as file:
            keys = file.keys()
            types.update({key: str(file.get_slice(key).get_dtype()) for key in keys})
    return types


def read_tensor(name: str, folder: Path, key: str) -> Tensor:
    """Return one tensor of a model, after its file was fetched if the model is one of the hub.

    Raises:
        UnsupportedModelError: The file is missing, truncated or damaged.
    """
    path = _file_of(folder, key)
    if not Path(name).is_dir():
        cached_file(name, path.name)
    with _opened(folder, path) as file:
        tensor: Tensor = file.get_tensor(key)
    return tensor


def check_shape(name: str, key: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Check a tensor's shape.

    Raises:
        UnsupportedModelError: It differs.
    """
    if tuple(tensor.shape) != shape:
        reason = f"{key} has the shape {list(tensor.shape)}, its configuration says {list(shape)}"
        raise UnsupportedModelError(name, reason)


def _file_of(folder: Path, key: str) -> Path:
    if (folder / _WEIGHTS).is_file():
        return folder / _WEIGHTS
    return folder / str(json.loads((folder / _INDEX).read_text())["weight_map"][key])


def _opened(folder: Path, path: Path) -> safe_open:
    """Open a safetensors file.

    Raises:
        UnsupportedModelError: It is truncated or damaged.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(
            str(folder), f"its {path.name} is missing, truncated or damaged: {error}"
        ) from error
