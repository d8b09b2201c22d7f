"""Builds what a worker with vLLM serves, from its settings."""

from __future__ import annotations

from gammaray.config import TargetSettings
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError
from services.process.fingerprints import check_drafter, model_identity, vocab_sha256
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.streaming.messages import Model
from services.vllm.engine import EngineOptions, VllmEngine
from services.vllm.heads import TARGETS_OWN
from services.vllm.scheduler import VllmScheduler

__all__ = ["load_target"]


def load_target(path: str, settings: TargetSettings, limits: Limits) -> tuple[Model, VllmScheduler]:
    """Load a target on vLLM; return its facts and its scheduler.

    Args:
        path: Directory or hub name.
        settings: Of the worker.
        limits: Bounds of one forward.

    Raises:
        UnsupportedVllmError: vLLM is missing, or in another version.
        InvalidArgumentError: vLLM cannot load the model or the head, there is no GPU, too little memory, or
            the head is for another target.
    """
    budget = settings.cache_budget_mb
    engine = VllmEngine(
        EngineOptions(
            model=path,
            device=settings.device,
            dtype=settings.dtype,
            max_batch_tokens=limits.max_batch_tokens,
            prefill_chunk=limits.prefill_chunk,
            cache_budget_bytes=None if budget is None else budget << 20,
            memory_share=settings.cache_memory_share,
            tensor_parallel=settings.tensor_parallel,
            head=_head(settings.head, path) if settings.head else "",
        )
    )
    identity = model_identity(path, dtype=engine.dtype, device=engine.device, deterministic=False)
    model = Model(
        settings.model,
        engine.vocab_size,
        engine.max_context,
        vocab_sha256(path),
        kernel=engine.kernel,
        identity=identity,
        takes_trees=False,
    )
    return model, VllmScheduler(engine, limits, Grammars(path, engine.vocab_size))


def _head(name: str, target: str) -> str:
    """Return the directory or hub name of what drafts in a target, or "mtp".

    Raises:
        InvalidArgumentError: It is for another target, or has another vocabulary.
    """
    if name == TARGETS_OWN:
        return name
    head = resolve_model(name, "draft", "head")
    check_drafter(head, target)
    own, theirs = vocab_sha256(head), vocab_sha256(target)
    if own and theirs and own != theirs:
        raise InvalidArgumentError("head", name, f"a drafter with the vocabulary of {target}")
    return head
