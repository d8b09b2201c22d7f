"""Recognises heads among drafters by their files, without the libraries that load them."""

from __future__ import annotations

import json
import struct
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gammaray.errors import InvalidArgumentError

__all__ = ["check_draft_head", "is_draft_head"]

_ARCHITECTURES = frozenset({"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"})
_FIRST_MATRIX = "fc.weight"
_WEIGHTS = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000


def is_draft_head(name: str) -> bool:
    """Return whether a draft of `gammaray up` is an EAGLE head, which needs features of the target.

    Args:
        name: Directory, or name of a model in the hub's cache; all other names are no heads.
    """
    folder = _folder(name)
    if folder is None:
        return False
    config = _json(folder / "config.json")
    architectures = config.get("architectures")
    if "speculators_model_type" in config:
        return True
    if isinstance(architectures, list) and not _ARCHITECTURES.isdisjoint(map(str, architectures)):
        return True
    index = _json(folder / f"{_WEIGHTS}.index.json").get("weight_map")
    names = index if isinstance(index, dict) else _header(folder / _WEIGHTS)
    return _FIRST_MATRIX in names


def check_draft_head(field: str, name: str) -> None:
    """Check that a draft is no head that drafts in target workers only.

    Args:
        field: Setting that names it, for the error.
        name: As for `is_draft_head`.

    Raises:
        InvalidArgumentError: It is a DFlash or Medusa head.
    """
    folder = _folder(name)
    config = {} if folder is None else _json(folder / "config.json")
    kind = ""
    if "dflash_config" in config or config.get("speculators_model_type") == "dflash":
        kind = "a DFlash head"
    elif config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        kind = "Medusa heads"
    if kind:
        allowed = "a draft model or an EAGLE head; these draft in the target worker only, as its head"
        raise InvalidArgumentError(field, f"{name} ({kind})", allowed)


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
