"""Builds what a worker with vLLM serves, from its settings."""

from __future__ import annotations

from gammaray.config import TargetSettings, parse_adapters
from gammaray.demo_pair import resolve_model
from services.process.fingerprints import check_drafter, model_identity, vocab_sha256
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from services.streaming.messages import Model
from services.vllm.adapters import adapter_sha256
from services.vllm.engine import EngineOptions, VllmEngine
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
        InvalidArgumentError: vLLM cannot load the model, there is no GPU, too little memory, or the head
            is for another target.
    """
    head = resolve_model(settings.head, "draft", "head") if settings.head else ""
    if head:
        check_drafter(head, path)
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
            is_batch_invariant=settings.deterministic,
            adapters=parse_adapters(settings.lora),
            head=head,
        )
    )
    identity = model_identity(
        path, dtype=engine.dtype, device=engine.device, deterministic=settings.deterministic
    )
    adapters = {
        name: f"{identity}/lora/{adapter_sha256(directory)}" if identity else ""
        for name, directory in parse_adapters(settings.lora).items()
    }
    model = Model(
        settings.model,
        engine.vocab_size,
        engine.max_context,
        vocab_sha256(path),
        kernel=engine.kernel,
        identity=identity,
        adapters=adapters,
        takes_trees=False,
    )
    return model, VllmScheduler(engine, limits, Grammars(path, engine.vocab_size))
