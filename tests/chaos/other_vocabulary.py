"""The demo target with another vocabulary: fewer merges, and other ids for the tokens that remain."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NUM_MERGES = 1200
SEED = 0
EMBEDDING = "model.embed_tokens.weight"
"""Also the weights of the output, which is tied to it."""


def with_fewer_merges(source: Path, copy: Path, num_merges: int = NUM_MERGES) -> Path:
    """Save a copy of a byte-level BPE model that has only the first merges of its tokenizer.

    Texts become other, and more, tokens. The model was trained on texts in which these tokens occur, so that
    it still predicts them well. Their ids are shuffled, except those of special tokens.
    """
    shutil.copytree(source, copy)
    path = copy / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(path.read_text())
    bpe = tokenizer["model"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    merges = bpe["merges"][:num_merges]
    dropped = {"".join(pair) for pair in bpe["merges"][num_merges:]} - {"".join(pair) for pair in merges}
    kept = sorted((old, token) for token, old in bpe["vocab"].items() if token not in dropped)
    movable = [number for number, (_, token) in enumerate(kept) if token not in special]
    ids = dict(zip(movable, random.Random(SEED).sample(movable, len(movable)), strict=True))
    order = [ids.get(number, number) for number in range(len(kept))]
    bpe["merges"] = merges
    bpe["vocab"] = {token: order[number] for number, (_, token) in enumerate(kept)}
    path.write_text(json.dumps(tokenizer))
    rows = torch.empty(len(kept), dtype=torch.long)
    rows[order] = torch.tensor([old for old, _ in kept])
    weights = load_file(source / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING][rows]
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": len(kept)}))
    return copy
