"""Loads what drafts in a target worker: a head, or a small draft model."""

from __future__ import annotations

from pathlib import Path

import torch

from gammaray.config import TargetSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.native.runner import NativeRunner
from services.heads.block_runners import dflash_engine, medusa_engine
from services.heads.dflash_formats import load_dflash, names_dflash
from services.heads.fusion import FeatureFusion
from services.heads.loading import load_fusion, load_head, names_head
from services.heads.medusa_formats import load_medusa, names_medusa
from services.heads.runner import HEAD_CACHE_BYTES, head_engine
from services.process.fingerprints import check_drafter, head_sha256, vocab_sha256
from services.speculation.head_drafter import MAX_FEATURES, HeadDrafter
from services.speculation.local_drafter import LocalDrafter
from services.target.dflash import DFlashDrafter
from services.target.draft_model import ModelDrafter
from services.target.features import FeatureSource
from services.target.medusa import MedusaDrafter

__all__ = ["load_feature_source", "load_local_drafter"]

TRAINED_WINDOW = 64
"""Positions that a head of `gammaray train` reads of a prompt: with the newest 32, 1 - TV is 0.374 instead of
0.376 (`benchmarks.feature_window`), and a prompt of 500 tokens takes the head 25 ms."""


def load_local_drafter(settings: TargetSettings, engine: Engine) -> LocalDrafter:
    """Load the head or draft model that the settings of a target worker name.

    Args:
        settings: Of the worker; `head` is not empty.
        engine: The target.

    Raises:
        InvalidArgumentError: It is for another target, or no drafter of a kind that can draft here.
        UnsupportedModelError: Its format, a flag, a size or a tensor is not supported.
    """
    target = resolve_model(settings.model, "target", "model")
    name = resolve_model(settings.head, "draft", "head")
    check_drafter(name, target)
    if names_medusa(name):
        return _load_medusa(settings, name, target, engine)
    if names_dflash(name):
        return _load_dflash(settings, name, target, engine)
    if not names_head(name):
        return _load_draft_model(settings, name, target, engine)
    head, target_ids = load_head(name, target)
    head.to(engine.device, torch.float32 if engine.device.type == "cpu" else engine.dtype)
    drafting = head_engine(
        head,
        target_ids,
        name=name,
        max_context=engine.max_context,
        weights=settings.draft_weights,
        uses_kernel=settings.engine != "transformers",
    )
    is_own = (Path(name) / "gammaray.json").is_file()
    return HeadDrafter(drafting, head.config.taps, window=TRAINED_WINDOW if is_own else MAX_FEATURES)


def _load_medusa(settings: TargetSettings, name: str, target: str, engine: Engine) -> MedusaDrafter:
    heads, target_ids = load_medusa(name, target)
    heads.to(engine.device, torch.float32 if engine.device.type == "cpu" else engine.dtype)
    drafting = medusa_engine(
        heads, target_ids, name=name, max_context=engine.max_context, weights=settings.draft_weights
    )
    return MedusaDrafter(drafting, heads.config.last_layer)


def _load_dflash(settings: TargetSettings, name: str, target: str, engine: Engine) -> DFlashDrafter:
    head, target_ids = load_dflash(name, target)
    head.to(engine.device, torch.float32 if engine.device.type == "cpu" else engine.dtype)
    drafting = dflash_engine(
        head, target_ids, name=name, max_context=engine.max_context, weights=settings.draft_weights
    )
    return DFlashDrafter(drafting)


def load_feature_source(settings: TargetSettings, engine: Engine) -> tuple[FeatureSource, str]:
    """Load what makes features for the head that the settings of a target worker name.

    Args:
        settings: Of the worker; `features` is not empty.
        engine: The target.

    Returns:
        It, and the head's fingerprint.

    Raises:
        InvalidArgumentError: The head is for another target, or cannot be read.
        UnsupportedModelError: Its format, a flag, a size or a tensor is not supported.
    """
    target = resolve_model(settings.model, "target", "model")
    check_drafter(settings.features, target)
    head = load_fusion(settings.features, target)
    head.to(engine.device, torch.float32 if engine.device.type == "cpu" else engine.dtype)
    fusion = FeatureFusion(head, uses_kernel=settings.engine != "transformers")
    return FeatureSource(fusion, settings.feature_window), head_sha256(settings.features)


def _load_draft_model(settings: TargetSettings, name: str, target: str, engine: Engine) -> ModelDrafter:
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
    if not isinstance(engine.runner, NativeRunner):
        torch.set_num_threads(settings.threads)  # a draft model on the kernel leaves torch one
    allowed = f"an EAGLE, DFlash or Medusa head, or an ordinary draft model with the vocabulary of {target}"
    if drafting.mask_token is not None or drafting.vocab_size != engine.vocab_size:
        raise InvalidArgumentError("head", name, allowed)
    own, theirs = vocab_sha256(name), vocab_sha256(target)
    if own and theirs and own != theirs:
        raise InvalidArgumentError("head", name, allowed)
    return ModelDrafter(drafting)
