"""Loads what drafts in a target worker: a head, or a small draft model."""

from __future__ import annotations

import torch
from torch import Tensor

from gammaray.config import TargetSettings
from gammaray.demo_pair import early_exit_layers, resolve_model
from gammaray.errors import InvalidArgumentError
from services.engine.core.drafter import is_parallel
from services.engine.core.model import load_config
from services.engine.core.tensor_files import checkpoint_folder, tensor_names
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.heads.eagle import EagleHead
from services.heads.formats import read_config
from services.heads.loading import load_head, names_head
from services.heads.runner import HEAD_CACHE_BYTES, head_engine
from services.learning.drafter import LearningDrafter
from services.learning.learner import check_head
from services.learning.versions import is_own, learn
from services.process.fingerprints import check_drafter, have_other_tokens
from services.speculation.head_drafter import MAX_FEATURES, HeadDrafter
from services.speculation.local_drafter import LocalDrafter
from services.vocabulary.translation import target_size

TRAINED_WINDOW = 64
"""Positions that a head of `gammaray train` reads of a prompt: with the newest 32, 1 - TV is 0.374 instead of
0.376, and a prompt of 500 tokens takes the head 25 ms."""


def check_local_drafter(settings: TargetSettings) -> None:
    """Check the head or draft model that the settings of a target worker name, by its configuration.

    Raises:
        InvalidArgumentError: It is for another target, cannot learn, or is of a kind that cannot draft here.
        UnsupportedModelError: Its format, a flag or a size is not supported.
    """
    target, name = _names(settings)
    if settings.learn:
        check_head(settings.learn, name)
    check_drafter(name, target)
    folder = checkpoint_folder(name)
    if folder is not None and names_head(name):
        read_config(name, folder, tensor_names(folder), load_config(target).get_text_config())
    elif early_exit_layers(name, field="head") is None:
        has_other_tokens = target_size(name) != target_size(target) or have_other_tokens(name, target)
        if has_other_tokens or is_parallel(name):
            allowed = f"an EAGLE-3 head, or an ordinary draft model with the vocabulary of {target}"
            raise InvalidArgumentError("head", name, allowed)


def load_local_drafter(settings: TargetSettings, engine: Engine) -> LocalDrafter:
    """Load the checked head or draft model that settings name; UnsupportedModelError if that fails."""
    target, name = _names(settings)
    if not names_head(name):
        return _load_draft_model(settings, name, target, engine)
    return _drafter(settings, engine, name, *load_head(name, target))


def load_learning_drafter(settings: TargetSettings, engine: Engine) -> LearningDrafter:
    """Load the head of `gammaray train` that the settings of a target worker name, and start to learn."""
    target, name = _names(settings)
    head, target_ids = load_head(name, target)
    base = _drafter(settings, engine, name, head, target_ids)

    def load(directory: str) -> HeadDrafter:
        return _drafter(settings, engine, directory, *load_head(directory, target, head))

    return LearningDrafter(base.taps, learn(settings.learn, target, name, base, load))


def _names(settings: TargetSettings) -> tuple[str, str]:
    return resolve_model(settings.model, "target", "model"), resolve_model(settings.head, "draft", "head")


def _drafter(
    settings: TargetSettings, engine: Engine, name: str, head: EagleHead, target_ids: Tensor | None
) -> HeadDrafter:
    head.to(engine.device, torch.float32 if engine.device.type == "cpu" else engine.dtype)
    drafting = head_engine(
        head,
        target_ids,
        name=name,
        max_context=engine.max_context,
        weights=settings.draft_weights,
        uses_kernel=settings.engine != "transformers",
    )
    return HeadDrafter(drafting, TRAINED_WINDOW if is_own(name) else MAX_FEATURES)


def _load_draft_model(settings: TargetSettings, name: str, target: str, engine: Engine) -> LocalDrafter:
    drafting = load_engine(
        name,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        cache_budget_bytes=HEAD_CACHE_BYTES,
        engine=settings.engine,
        weights=settings.draft_weights,
        draft_for=target,
    )
    if not engine.runner.has_kernel:
        torch.set_num_threads(settings.threads)  # a draft model on the kernel leaves torch one
    return LocalDrafter(drafting)
