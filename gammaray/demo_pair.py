"""Names of models that are no directories: `demo`, `early-exit:N`; and files, which are no models.

`demo` stands for the demo pair, which the distribution gammaray-demo-pair installs. `early-exit:N` is a
drafter made of the target's first N layers, its final norm and its head (LayerSkip, arXiv 2404.16710).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gammaray.errors import InvalidArgumentError

DEMO_PAIR = "demo"
"""Model name that stands for the demo pair: its target or its draft, by role."""

DRAFTER_FILE = "gammaray.json"
"""File of a drafter directory that says which target it was trained for, and what was measured."""

_PACKAGE = "gammaray_demo_pair"

_EARLY_EXIT = "early-exit:"


def is_missing(name: str) -> bool:
    """Whether a name is that of a directory that does not exist; names on the hub begin otherwise."""
    return name.startswith((".", "/", "~")) and not Path(name).exists()


def resolve_model(name: str, role: str = "target", field: str = "model") -> str:
    """Return the directory or hub name that a model's name stands for; "demo" stands for one by role.

    InvalidArgumentError if the `field` names another role, a directory that does not exist, a GGUF file, or
    "demo" where the demo pair is not installed.
    """
    if is_missing(name):
        allowed = "a directory, or the name of a model on the hub or in its cache"
        raise InvalidArgumentError(field, f"{name!r}, which does not exist", allowed)
    if name.lower().endswith(".gguf") and not Path(name).is_dir():
        how = "`python -m services.engine.convert FILE.gguf DIRECTORY` makes the directory"
        raise InvalidArgumentError(field, name, f"a directory or hub name; {how}")
    if name != DEMO_PAIR:
        return name
    if role not in ("target", "draft"):
        raise InvalidArgumentError("role", role, "target or draft")
    package = importlib.util.find_spec(_PACKAGE)
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (Path(folder) / role).is_dir():
            return str(Path(folder) / role)
    allowed = "another model, or the demo pair installed with pip install 'gammaray[demo]'"
    raise InvalidArgumentError(field, DEMO_PAIR, allowed)


def early_exit_layers(name: str, num_layers: int | None = None, field: str = "draft") -> int | None:
    """Return the N of `early-exit:N`, below the target's layers if these are known; else None."""
    if not name.startswith(_EARLY_EXIT):
        return None
    number = name.removeprefix(_EARLY_EXIT)
    is_number = number.isascii() and number.isdecimal() and len(number) < 6
    if not is_number or not 1 <= int(number) < (num_layers or 10**6):
        most = "" if num_layers is None else f" to {num_layers - 1}, as the target has {num_layers} layers"
        raise InvalidArgumentError(field, name, f"{_EARLY_EXIT}N with N from 1{most}")
    return int(number)
