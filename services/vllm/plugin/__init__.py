"""Plug-in for vLLM whose speculation gives the tokens of plain decoding; docs/vllm-plugin.md.

Installed, the package is `gammaray_vllm`. vLLM calls `register` in each of its processes. Nothing else of
gammaray is imported, and nothing of vLLM or torch unless `VARIABLE` asks for the plug-in.
"""

from __future__ import annotations

import logging
import os

__all__ = ["RUNNER_VARIABLE", "VARIABLE", "register"]

VARIABLE = "GAMMARAY_VLLM_COUPLED"
"""Environment variable that turns the plug-in on, unless it is empty or 0."""

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable that selects its model runner: 0 for V1, the plug-in's default, 1 for V2."""


def register() -> None:
    """Hook into vLLM if `VARIABLE` asks for it; the entry point of the group `vllm.general_plugins`."""
    if os.environ.get(VARIABLE, "") in ("", "0"):
        return
    os.environ.setdefault(RUNNER_VARIABLE, "0")
    try:
        from .hooks import install

        install()
    except (AttributeError, ImportError) as error:
        logging.getLogger("vllm").error("gammaray-vllm is NOT active in this version of vLLM: %s", error)
