"""Names of models: `demo` stands for the demo pair, which the distribution gammaray-demo-pair installs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from gammaray.errors import InvalidArgumentError

__all__ = ["DEMO_PAIR", "resolve_model"]

DEMO_PAIR = "demo"
"""Model name that stands for the demo pair: its target or its draft, by role."""

_PACKAGE = "gammaray_demo_pair"


def resolve_model(name: str, role: str = "target", field: str = "model") -> str:
    """Return the directory, hub name or GGUF file that a model's name stands for.

    Args:
        name: Directory, hub name, GGUF file or "demo".
        role: "target" or "draft".
        field: Name of the setting, for the error.

    Raises:
        InvalidArgumentError: Another role, or "demo" if the demo pair is not installed.
    """
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
