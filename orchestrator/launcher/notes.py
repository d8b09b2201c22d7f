"""What the launcher says about a cluster's models before it starts them."""

from __future__ import annotations

from gammaray.config import ClusterSettings
from gammaray.gguf import is_gguf, read_header

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_notes(settings: ClusterSettings, num_gpus: int) -> list[str]:
    """Return what is not obvious from the settings: what GGUF files become, and how targets speculate.

    Args:
        settings: Settings of the cluster.
        num_gpus: GPUs that workers may use.

    Raises:
        InvalidArgumentError: A GGUF file cannot be read.
    """
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if num_gpus else "float32"
    used = {"target": settings.target}
    if settings.draft_workers.maximum:
        used["draft"] = settings.draft
    notes = [
        f"{role} {read_header(model, role).summary(dtype, _BYTES[dtype])}"
        for role, model in used.items()
        if is_gguf(model)
    ]
    if settings.head:
        notes.append(f"the head {settings.head} drafts in the target workers")
    elif "draft" not in used:
        notes.append("no draft workers: speculates by look-ups in the text; --draft names a draft model")
    return notes
