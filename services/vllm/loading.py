"""Builds what a worker with vLLM serves, from its settings."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from gammaray.config import DraftSettings, TargetSettings, WorkerSettings, parse_adapters
from gammaray.demo_pair import early_exit_layers, resolve_model
from gammaray.errors import InvalidArgumentError
from services.engine.core.drafter import is_ordinary
from services.heads.loading import names_head
from services.learning.swapped_head import check_swapped, swapped_head
from services.process.fingerprints import check_drafter, have_other_tokens, vocab_sha256
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.speculation.fixed_head import FixedHead
from services.speculation.outcomes import AHEAD_ROWS
from services.streaming.messages import Model
from services.vllm.draft_scheduler import VllmDraftScheduler
from services.vllm.engine import EngineOptions, VllmEngine
from services.vllm.heads import TARGETS_OWN
from services.vllm.scheduler import VllmScheduler
from services.vocabulary.translation import target_size

_ALLOWED_MODEL = "a directory or hub name of a causal model with vLLM as the engine"


def load_target(path: str, settings: TargetSettings, limits: Limits) -> tuple[VllmEngine, VllmScheduler]:
    """Load a target on vLLM; return its engine and its scheduler.

    Raises:
        UnsupportedVllmError: vLLM is missing, or in another version.
        InvalidArgumentError: vLLM cannot load the model or the head, there is no GPU, too little memory, or
            the head is for another target, or cannot learn; or vLLM has no kernels for quantised weights.
    """
    _check_kernels(path, settings.device)
    head = _head(settings.head, path) if settings.head else ""
    if settings.learn:
        check_swapped(settings.learn, head)
    engine = VllmEngine(
        replace(
            _options(path, settings, limits),
            tensor_parallel=settings.tensor_parallel,
            is_batch_invariant=settings.deterministic,
            adapters=parse_adapters(settings.lora),
            head=head,
        )
    )
    served = FixedHead()
    if settings.learn:
        served = swapped_head(settings.learn, path, head, engine.vocab_size, engine.load_head)
    return engine, VllmScheduler(engine, limits, Grammars(path, engine.vocab_size), served)


def _head(name: str, target: str) -> str:
    """Return the directory or hub name of what drafts in a target, or "mtp"."""
    if name == TARGETS_OWN:
        return name
    head = resolve_model(name, "draft", "head")
    check_drafter(head, target)
    if have_other_tokens(head, target):
        raise InvalidArgumentError("head", name, f"a drafter with the vocabulary of {target}")
    return head


def load_draft(
    path: str, target: str, settings: DraftSettings, limits: Limits
) -> tuple[Model, VllmDraftScheduler]:
    """Load a draft model on vLLM; return its facts and its scheduler. `target` is "" if it is not known.

    It raises what `load_target` and `check_draft` do.
    """
    check_draft(path, target, settings)
    _check_kernels(path, settings.device)
    engine = VllmEngine(replace(_options(path, settings, limits), is_draft=True))
    digest = vocab_sha256(target or path)
    model = Model(settings.model, engine.vocab_size, engine.max_context, digest, kernel=engine.kernel)
    scheduler = VllmDraftScheduler(
        engine,
        ahead_rows=AHEAD_ROWS if settings.draft_ahead else 0,
        grammars=Grammars(target or path, engine.vocab_size),
    )
    return model, scheduler


def check_draft(path: str, target: str, settings: DraftSettings) -> None:
    """Check that vLLM serves a drafter, before it is loaded; `target` is "" if it is not known.

    Raises:
        InvalidArgumentError: A kind of drafter or a setting that vLLM does not serve, or another vocabulary
            than the target's.
    """
    for field, value in (("draft_weights", "auto"), ("deterministic", False)):
        if (got := getattr(settings, field)) != value:
            raise InvalidArgumentError(field, got, f"{value!r} with vLLM as the engine")
    if early_exit_layers(path, field="model") is not None or names_head(path) or not is_ordinary(path):
        raise InvalidArgumentError("model", path, _ALLOWED_MODEL)
    if not target:
        return
    digest = vocab_sha256(target)
    # Without a tokenizer of its own, a draft has the target's.
    has_tokens = bool(digest) and vocab_sha256(path) in ("", digest)
    if not has_tokens or target_size(target) not in (0, target_size(path)):
        raise InvalidArgumentError("model", path, f"one of {target}'s vocabulary with vLLM as the engine")


def _check_kernels(path: str, device: str) -> None:
    """Refuse quantised weights on a CPU with AVX2 alone: most fail in the first forward, or are inexact."""
    is_cpu = device == "cpu" or not torch.cuda.is_available()
    if not is_cpu or torch.backends.cpu.get_cpu_capability() != "AVX2":
        return
    stored: dict[str, Any] = {}
    with suppress(OSError):  # vLLM says what is missing
        stored, _ = PretrainedConfig.get_config_dict(path)
    if "quantization_config" in stored:
        allowed = "one without quantised weights: vLLM's kernels for those need AVX-512, which this CPU lacks"
        raise InvalidArgumentError("model", path, allowed)


def _options(path: str, settings: WorkerSettings, limits: Limits) -> EngineOptions:
    budget = settings.cache_budget_mb
    return EngineOptions(
        model=path,
        device=settings.device,
        dtype=settings.dtype,
        threads=settings.threads,
        max_batch_tokens=limits.max_batch_tokens,
        prefill_chunk=limits.prefill_chunk,
        cache_budget_bytes=None if budget is None else budget << 20,
        memory_share=settings.cache_memory_share,
    )
