"""The drafter in training, and the directory that it becomes."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from gammaray.errors import FailedPreconditionError
from services.train.answers.store import Sequence, disk, write_json
from services.train.batches import KEEP, MASK, Batch, build_batch
from services.train.losses import loss_of

__all__ = ["Drafter", "choose_vocabulary", "save_drafter", "write_drafter"]


class Drafter(nn.Module):
    """Some of a target's layers and head rows; the target's input embedding, which is not trained.

    Args:
        target: A causal model with `model.embed_tokens`, `model.layers` and `lm_head`.
        layers: Numbers of the layers to start from.
        target_ids: Ascending ids of the head's rows.
        depth: Tokens per block; 1: a plain draft.

    Raises:
        FailedPreconditionError: The target has no such parts.
    """

    def __init__(self, target: PreTrainedModel, layers: Items[int], target_ids: Tensor, depth: int) -> None:
        super().__init__()
        parts: Any = target
        if not all(
            hasattr(getattr(parts, "model", None), part) for part in ("embed_tokens", "layers", "norm")
        ):
            raise FailedPreconditionError(
                f"model_type {target.config.model_type}: a drafter needs a target with model.embed_tokens, "
                "model.layers and model.norm, as Llama and Qwen have them"
            )
        config = copy.deepcopy(target.config)
        config.num_hidden_layers = len(layers)
        if getattr(config, "layer_types", None):
            config.layer_types = [config.layer_types[number] for number in layers]
        config.tie_word_embeddings = False
        make: Any = AutoModelForCausalLM.from_config
        self.model: Any = make(config, attn_implementation="sdpa").model.float()
        for own, number in zip(self.model.layers, layers, strict=True):
            own.load_state_dict(parts.model.layers[number].state_dict())
        self.model.norm.load_state_dict(parts.model.norm.state_dict())
        embedding = parts.model.embed_tokens.weight.detach().float()
        self.model.embed_tokens = nn.Identity()  # rows are looked up below, where masks have their own
        self.head = nn.Parameter(parts.get_output_embeddings().weight.detach().float()[target_ids].clone())
        self.mask_embedding = nn.Parameter(embedding[target_ids].mean(0, keepdim=True)) if depth > 1 else None
        self.embedding: Tensor
        self.target_ids: Tensor
        self.row_of: Tensor
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids)
        row_of = torch.full((len(embedding),), -1)
        row_of[target_ids] = torch.arange(len(target_ids))
        self.register_buffer("row_of", row_of, persistent=False)
        self.config, self.depth = config, depth

    def load_weights(self, stored: dict[str, Tensor]) -> None:
        """Start from the tensors of a directory of `save_drafter`, whose head's ids it takes.

        A plain drafter may become a parallel one, whose mask then starts as without it, and vice versa.

        Raises:
            KeyError, RuntimeError: They are of another shape.
        """
        ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
        if not torch.equal(ids, self.target_ids.cpu()):
            self.target_ids.copy_(ids)
            self.row_of.fill_(-1)
            self.row_of[ids] = torch.arange(len(ids))
        self.head.data.copy_(stored["lm_head.weight"])
        if self.mask_embedding is not None and "pard_embedding" in stored:
            self.mask_embedding.data.copy_(stored["pard_embedding"])
        layers = {key[6:]: value.float() for key, value in stored.items() if key.startswith("model.")}
        self.model.load_state_dict(layers)

    def forward(self, batch: Batch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, head rows]."""
        rows = F.embedding(batch.token_ids.clamp_min(0), self.embedding)
        if self.mask_embedding is not None:
            rows = torch.where((batch.token_ids == MASK)[..., None], self.mask_embedding, rows)
        hidden = self.model(
            inputs_embeds=rows, attention_mask=batch.allowed, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        chosen = hidden[batch.rows[:, 0], batch.rows[:, 1]]
        return F.linear(chosen, self.head.to(chosen.dtype)).float().log_softmax(-1)

    @property
    def num_weights(self) -> int:
        """Number of weights that one pass reads; the lookup of embeddings is not among them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def batch(
        self, sequences: Items[Sequence], *, keep: float = KEEP, generator: torch.Generator | None = None
    ) -> Batch:
        """Return a batch, see `build_batch`."""
        return build_batch(sequences, self.depth, keep=keep, generator=generator)

    def common(self, batch: Batch, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities and the drafter's log-probabilities of the target's top ids.

        Both are [predictions, top_k]; an id without a row has the target's probability 0, as nothing can be
        learnt for it.
        """
        rows = self.row_of[batch.top_ids]
        wanted = batch.top_logs.exp() * (rows >= 0)
        return wanted, logs.gather(1, rows.clamp_min(0))

    def loss(self, batch: Batch, kind: str) -> Tensor:
        """Return the mean loss; `kind` as in `losses.loss_of`."""
        return loss_of(kind, *self.common(batch, self(batch))).mean()


def choose_vocabulary(sequences: Iterable[Sequence], count: int, vocab_size: int) -> Tensor:
    """Return the ids that answers use most, int64 [count], ascending; unused ones follow by id."""
    seen: Counter[int] = Counter()
    for sequence in sequences:
        seen.update(sequence.token_ids[sequence.num_prompt :].tolist())
    order = sorted(range(vocab_size), key=lambda token: (-seen[token], token))
    return torch.tensor(sorted(order[:count]))


def save_drafter(
    drafter: Drafter, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]
) -> int:
    """Write a drafter directory, in bfloat16; files are replaced one by one, the weights first.

    Returns:
        Size of the weights in bytes.

    Raises:
        ResourceExhaustedError: The disk is full; what the directory held is intact.
    """
    weights = {
        f"model.{key}": value
        for key, value in drafter.model.state_dict().items()
        if "embed_tokens" not in key
    }
    weights["lm_head.weight"] = drafter.head.detach()
    if drafter.mask_embedding is not None:
        weights["pard_embedding"] = drafter.mask_embedding.detach()
    weights = {key: value.detach().to("cpu", torch.bfloat16).contiguous() for key, value in weights.items()}
    ids = drafter.target_ids.cpu()
    config = drafter.config.to_dict() | {"dtype": "bfloat16", "architectures": drafter.config.architectures}
    weights["d2t"] = ids - torch.arange(len(ids))
    config["draft_vocab_size"] = len(ids)
    if drafter.depth > 1:
        config["pard_token"] = 0
    return write_drafter(folder, weights, config, identity, name, card, _card(name, drafter, card))


def write_drafter(
    folder: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    identity: dict[str, str],
    name: str,
    card: dict[str, Any],
    text: str,
) -> int:
    """Write the directory of a drafter or head; files are replaced one by one, the weights first.

    Args:
        folder: The directory.
        weights: Its tensors, on the CPU.
        config: Its config.json.
        identity: Fingerprints of the target and of its tokenizer.
        name: The target's name.
        card: The measurements.
        text: Its README.

    Returns:
        Size of the weights in bytes.

    Raises:
        ResourceExhaustedError: The disk is full; what the directory held is intact.
    """
    described = {
        "format": 1,
        "target": {"name": name, "fingerprint": identity["target"]},
        "tokenizer": {"fingerprint": identity["tokenizer"]},
        "measured": card,
    }
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / ".model.safetensors.new"
        try:
            save_file(weights, temporary, metadata={"format": "pt"})
        except Exception as error:  # safetensors reports a full disk by an error class of its own
            temporary.unlink(missing_ok=True)
            raise OSError(f"model.safetensors: {error}") from error
        os.replace(temporary, folder / "model.safetensors")
        write_json(folder / "config.json", config)
        write_json(folder / "gammaray.json", described)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size


def _card(name: str, drafter: Drafter, card: dict[str, Any]) -> str:
    kind = (
        f"A parallel draft model (PARD), {drafter.depth} tokens per pass," if drafter.depth > 1 else "A draft"
    )
    lines = [
        f"# Drafter for {name}\n",
        f"{kind} of {drafter.config.num_hidden_layers} layers and {len(drafter.target_ids)} output tokens, "
        "trained by `gammaray train` on text of the target. Its weights derive from the target's, whose "
        "licence applies. It shares the target's input embedding and tokenizer.\n",
        f"Measured on held-out answers:\n\n```json\n{json.dumps(card, indent=1)}\n```",
    ]
    return "\n".join(lines) + "\n"
