"""Tensors of checkpoints in safetensors, in a directory or on the hub, read one by one."""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from services.engine.core.errors import InvalidModelError, UnsupportedModelError

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"


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
    """Return the names of all tensors of a directory; none without safetensors.

    Raises:
        UnsupportedModelError: A file is truncated or damaged.
    """
    if (folder / _WEIGHTS).is_file():
        with _opened(folder, folder / _WEIGHTS) as file:
            return list(file.keys())
    if (folder / _INDEX).is_file():
        return sorted(_index(folder))
    return []


def _index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    try:
        files = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {str(key): str(file) for key, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        allowed = "an object with the file of each tensor"
        raise InvalidModelError(str(folder), _INDEX, "weight_map", repr(error), allowed) from error


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
        try:
            tensor: Tensor = file.get_tensor(key)
        except SafetensorError as error:
            raise InvalidModelError(
                name, path.name, key, "no tensor", f"the one that {_INDEX} names"
            ) from error
    return tensor


def _file_of(folder: Path, key: str) -> Path:
    if (folder / _WEIGHTS).is_file():
        return folder / _WEIGHTS
    return folder / _index(folder)[key]


def _opened(folder: Path, path: Path) -> safe_open:
    """Open a safetensors file."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(
            str(folder), f"its {path.name} is missing, truncated or damaged: {error}"
        ) from error
