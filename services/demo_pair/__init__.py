"""The target and draft models that ship with gammaray; see MODEL_CARD.md beside this file."""

from pathlib import Path

__all__ = ["DRAFT_DIR", "TARGET_DIR"]

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
