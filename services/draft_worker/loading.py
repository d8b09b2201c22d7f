"""Loads the versions of a draft model that is trained while it serves."""

from __future__ import annotations

from gammaray.config import DraftSettings
from gammaray.errors import InvalidArgumentError
from services.engine.engine import Engine
from services.engine.loader import DraftVersions
from services.learning.learner import LearningDraftModel
from services.learning.versions import SPAN, is_own, learn


def check_learning(path: str, target: str, settings: DraftSettings) -> None:
    """Check that a draft model can learn: one of `gammaray train`, whose target the settings name."""
    if not is_own(path):
        raise InvalidArgumentError(
            "learn", settings.learn, f"empty, as {path} is no draft model of gammaray train"
        )
    if not target:
        raise InvalidArgumentError("target", target, f"the target of {path}, with learn")


def load_learning(path: str, target: str, settings: DraftSettings, engine: Engine) -> LearningDraftModel:
    """Begin to learn with a draft model that has been checked."""
    load = DraftVersions(path, settings, target).runner
    return LearningDraftModel(learn(settings.learn, target, path, engine.runner, load, SPAN))
