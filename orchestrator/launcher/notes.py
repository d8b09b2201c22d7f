"""What the launcher says about a cluster's models before it starts them."""

from __future__ import annotations

import asyncio

from gammaray.config import ClusterSettings
from gammaray.draft_server import DraftServerUrl, is_draft_server
from gammaray.gguf import is_gguf, read_header

__all__ = ["model_notes"]

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

ANSWER_S = 3.0
"""Time in which a server that drafts should say what it is."""


def model_notes(settings: ClusterSettings, num_gpus: int) -> list[str]:
    """Return what is not obvious from the settings: what GGUF files become, and how targets speculate.

    Args:
        settings: Settings of the cluster.
        num_gpus: GPUs that workers may use.

    Raises:
        InvalidArgumentError: A GGUF file, or a file for the server that drafts, cannot be read.
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
    if is_draft_server(settings.draft):
        notes.append(asyncio.run(_server_note(settings)))
    elif settings.head:
        notes.append(f"the head {settings.head} drafts in the target workers")
    elif "draft" not in used:
        notes.append("no draft workers: speculates by look-ups in the text; --draft names a draft model")
    return notes


async def _server_note(settings: ClusterSettings) -> str:
    """Return what the server that drafts says about itself, or why it does not answer.

    Raises:
        InvalidArgumentError: A file cannot be read.
    """
    from orchestrator.drafting.http.client import DraftClient, DraftServerError  # slow to import
    from orchestrator.drafting.http.server import identify

    url = DraftServerUrl.parse(settings.draft)
    client = DraftClient(url, settings.draft_key_file, settings.draft_ca_file)
    try:
        identity = await identify(client, url.model, ANSWER_S)
    except DraftServerError as error:
        return f"the server at {url.address} does not draft: {error}; look-ups in the text do until it does"
    finally:
        await client.close()
    return f"the server at {url.address} drafts: {identity.dialect.name}, model {identity.model}"
