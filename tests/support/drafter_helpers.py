"""Drafter directories in the formats of `services.engine.core.drafter`, made from saved models."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.process.fingerprints import vocab_sha256, weights_sha256

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def make_drafter(
    source: Path,
    directory: Path,
    *,
    pard_token: int | None = None,
    mask_embedding: bool = False,
    shares_embedding: bool = False,
    draft_vocab_size: int | None = None,
    target: Path | None = None,
    **changes: Any,
) -> Path:
    """Save a drafter with the weights of a Llama-like model in one safetensors file; return its directory.

    Args:
        directory: Where to save the drafter.
        pard_token: The mask token; None for an ordinary draft model.
        mask_embedding: Give the mask an embedding of its own (`pard_embedding`), a random one.
        shares_embedding: Leave out the input embedding.
        draft_vocab_size: Keep only so many rows of the head, chosen at random.
        target: Write a `gammaray.json` for this target.
        changes: Further changes to config.json.
    """
    generator = torch.Generator().manual_seed(3)
    config = json.loads((source / "config.json").read_text()) | changes
    weights = load_file(source / "model.safetensors")
    embedding, vocab_size = weights[EMBEDDING], config["vocab_size"]
    if pard_token is not None:
        config["pard_token"] = pard_token
    if mask_embedding:
        noise = torch.randn(1, embedding.shape[1], generator=generator) * embedding.float().std()
        weights["pard_embedding"] = noise.to(embedding.dtype)
    if draft_vocab_size is not None:
        ids = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        weights[HEAD] = weights.get(HEAD, embedding)[ids]
        weights["d2t"] = ids - torch.arange(draft_vocab_size)
        config |= {"draft_vocab_size": draft_vocab_size, "tie_word_embeddings": False}
    if shares_embedding:
        del weights[EMBEDDING]
    directory.mkdir(parents=True)
    save_file({key: value.clone() for key, value in weights.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    if target is not None:
        described = {
            "format": 1,
            "target": {"name": target.name, "fingerprint": weights_sha256(str(target))},
            "tokenizer": {"fingerprint": vocab_sha256(str(target))},
        }
        (directory / "gammaray.json").write_text(json.dumps(described))
    return directory
