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
        index = cached_file(name, _INDEX, _raise_exceptions_for_missing_entries=False)
        return Path(index or str(cached_file(name, _WEIGHTS))).parent
    except (OSError, HFValidationError):
        return None


def tensor_names(folder: Path) -> list[str]:
    """Return a directory's tensor names in safetensors; UnsupportedModelError if a file is damaged."""
    if (folder / _WEIGHTS).is_file():
        with _opened(folder, folder / _WEIGHTS) as file:
            return list(file.keys())
    if (folder / _INDEX).is_file():
        return sorted(_index(folder))
    return []


def _index(folder: Path) -> dict[str, str]:
    try:
        files = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {str(key): str(file) for key, file in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        allowed = "an object with the file of each tensor"
        raise InvalidModelError(str(folder), _INDEX, "weight_map", repr(error), allowed) from error


def tensor_types(folder: Path) -> dict[str, str]:
    """Return the type of each tensor in safetensors; UnsupportedModelError if a file is damaged."""
    types = {}
    for path in {_file_of(folder, key) for key in tensor_names(folder)}:
        with _opened(folder, path) as file:
            keys = file.keys()
            types.update({key: str(file.get_slice(key).get_dtype()) for key in keys})
    return types


def read_tensor(name: str, folder: Path, key: str) -> Tensor:
    """Return a tensor, from the hub if need be; UnsupportedModelError if its file is missing or damaged."""
    path = _file_of(folder, key)
    if not Path(name).is_dir():
        cached_file(name, path.name)
    with _opened(folder, path) as file:
        try:
            tensor: Tensor = file.get_tensor(key)
        except SafetensorError as error:
            allowed = f"the one that {_INDEX} names"
            raise InvalidModelError(name, path.name, key, "no tensor", allowed) from error
    return tensor


def _file_of(folder: Path, key: str) -> Path:
    if (folder / _WEIGHTS).is_file():
        return folder / _WEIGHTS
    return folder / _index(folder)[key]


def _opened(folder: Path, path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        reason = f"its {path.name} is missing, truncated or damaged: {error}"
        raise UnsupportedModelError(str(folder), reason) from error
