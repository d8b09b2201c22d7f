"""Recognises heads among drafters by their files, without the libraries that load them."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gammaray.errors import InvalidArgumentError

EAGLE_3 = "eagle3"
"""The kind of head that gammaray's own engines serve; vLLM serves others, too."""

_FIRST_MATRIX = "fc.weight"
_WEIGHTS = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000


def head_kind(name: str) -> str:
    """Return the kind of a head: "eagle3", "eagle" (1 and 2), "medusa", "dflash", or its `speculators` type.

    Args:
        name: Directory, or name of a model in the hub's cache.

    Returns:
        The kind; empty for a model and for all other names.
    """
    folder = _folder(name)
    if folder is None:
        return ""
    index = _json(folder / f"{_WEIGHTS}.index.json").get("weight_map")
    tensors = index if isinstance(index, dict) else _header(folder / _WEIGHTS)
    return kind_of_config(_json(folder / "config.json"), tensors)


def kind_of_config(config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """Return the kind of a head as of `head_kind`, of its configuration and the names of its tensors."""
    if kind := config.get("speculators_model_type"):
        return str(kind)
    given = config.get("architectures")
    names = " ".join(
        map(str, [config.get("model_type"), *(given if isinstance(given, list) else ())])
    ).lower()
    for kind, key in (("medusa", "medusa_num_heads"), ("dflash", "dflash_config"), (EAGLE_3, None)):
        if kind in names or key in config:
            return kind
    # The configuration of an EAGLE-1 head may be that of a Llama with one layer.
    return "eagle" if "eagle" in names or _FIRST_MATRIX in tensors else ""


def check_no_head(field: str, name: str) -> None:
    """Check that a draft of draft workers is no head, which reads the target's hidden states.

    Args:
        field: Setting that names it, for the error.
        name: As for `head_kind`.

    Raises:
        InvalidArgumentError: It is a head.
    """
    if kind := head_kind(name):
        allowed = "a draft model; a head drafts in target workers: name it with --head (setting head)"
        raise InvalidArgumentError(field, f"{name} (a head: {kind})", allowed)


def _folder(name: str) -> Path | None:
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache  # slow to import, and rarely needed

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file; empty for a file that is none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            found = json.loads(file.read(length)) if length <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, struct.error):
        return {}
    return found if isinstance(found, dict) else {}
