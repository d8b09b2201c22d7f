"""The target and draft models of the distribution gammaray-demo-pair; see MODEL_CARD.md in this folder.

Installed, the package is `gammaray_demo_pair`. Programs find it with `gammaray.demo_pair`.
"""

from pathlib import Path

__all__ = ["DRAFT_DIR", "TARGET_DIR"]

TARGET_DIR = Path(__file__).parent / "target"
DRAFT_DIR = Path(__file__).parent / "draft"
