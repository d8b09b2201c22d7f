"""What training needs of a drafter, and the directory that it becomes."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gammaray.errors import FailedPreconditionError
from gammaray.program.files import replacing
from services.engine.core.device import has_bfloat16
from services.process.fingerprints import model_identity, vocab_sha256
from services.train.answers.store import Sequence, disk, write_json
from services.train.batches import Batch
from services.train.losses import loss_of

DEPTH = 5
"""Tokens of the proposals that are measured."""

UNROLL = 3
"""Steps in which a head is trained on its own states, but for the first half of the time of a new one."""

_LARGE = 576
"""Hidden size above which the learning rate falls: at 1,536 a head diverges with 0.001."""

_DEPTH_WEIGHT = 0.8
"""Weight of a depth's loss relative to the one before, as a depth counts only if those before were right."""


class Trainable(nn.Module):
    """A drafter in training, with the rows `target_ids`, ascending, of the target's vocabulary.

    Of its `num_depths` trained depths, `depth` are evaluated.
    """

    depth = num_depths = 1

    def __init__(self, vocab_size: int, target_ids: Tensor) -> None:
        super().__init__()
        self.target_ids: Tensor
        self.row_of: Tensor
        self.register_buffer("target_ids", target_ids.clone())
        self.register_buffer("row_of", torch.full((vocab_size,), -1), persistent=False)
        self.take_ids(target_ids)

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The output matrix, [rows, hidden_size]."""

    def rate(self, small: float) -> float:
        """Return the learning rate, where `small` is that of a small drafter."""
        return small * min(1.0, _LARGE / self.head.shape[1]) ** 2

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Number of weights that a drafted token reads; the lookup of embeddings is not among them."""

    @abstractmethod
    def batch(
        self, sequences: Items[Sequence], num_depths: int, generator: torch.Generator | None = None
    ) -> Batch:
        """Return a batch, see `build_batch`."""

    @abstractmethod
    def forward(self, batch: Batch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, rows of the output]."""

    @abstractmethod
    def start_from(self, init: str, target: str) -> None:
        """Take the weights and the output's ids of a trained drafter of the same kind, shape and target."""

    @abstractmethod
    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        """Write a directory in the published format, in bfloat16; files are replaced, the weights first.

        Returns the size of the weights in bytes. Where the disk is full, what the directory held is intact.
        """

    def take_ids(self, ids: Tensor) -> None:
        """Take the output's ids of another drafter with as many."""
        self.target_ids.copy_(ids)
        self.row_of.fill_(-1)
        self.row_of[ids] = torch.arange(len(ids))

    def common(self, batch: Batch, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities and the drafter's log-probabilities of the target's top ids.

        Both are [predictions, top_k]; an id without a row has the target's probability 0, as nothing can be
        learnt for it.
        """
        rows = self.row_of[batch.top_ids]
        return batch.top_logs.exp() * (rows >= 0), logs.gather(1, rows.clamp_min(0))

    def loss(self, batch: Batch, kind: str) -> Tensor:
        """Return the mean loss, in which later depths count less; `kind` as in `losses.loss_of`."""
        each = loss_of(kind, *self.common(batch, self(batch)))
        weight = _DEPTH_WEIGHT ** (batch.place[:, 2] - 1).float()
        return (each * weight).sum() / weight.sum()


def optimizer_of(drafter: Trainable, rate: float) -> torch.optim.AdamW:
    weights = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True)


def take_step(drafter: Trainable, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Change a drafter's weights by a batch's loss."""
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
    optimizer.step()


def train_on(
    drafter: Trainable,
    optimizer: torch.optim.Optimizer,
    sequences: Items[Sequence],
    num_tokens: int,
    seed: int,
    kind: str,
) -> float:
    """Take a step on random sequences of at least `num_tokens` answer tokens; return its `losses.loss_of`."""
    generator, device = torch.Generator().manual_seed(seed), drafter.head.device
    chosen: list[Sequence] = []
    while sum(sequence.num_answer for sequence in chosen) < num_tokens:
        chosen.append(sequences[int(torch.randint(len(sequences), (), generator=generator))])
    batch = drafter.batch(chosen, drafter.num_depths, generator).to(device)
    with mixed_precision(device):
        loss = drafter.loss(batch, kind)
    take_step(drafter, optimizer, loss)
    return loss.item()


def fingerprints_of(target: str) -> dict[str, str]:
    """Return the fingerprints of a target and of its tokenizer, as `Trainable.save` takes them."""
    identity = model_identity(target, dtype="-", device="cpu", deterministic=False)
    fingerprints = {"target": identity.partition("/")[0], "tokenizer": vocab_sha256(target)}
    if not all(fingerprints.values()):
        raise FailedPreconditionError(f"{target}: its weights or its tokenizer have no fingerprint")
    return fingerprints


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return a context of products in bfloat16 where that is faster: steps take 0.4 of the time."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device.type))


def write_drafter(
    folder: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    identity: dict[str, str],
    name: str,
    card: dict[str, Any],
    about: str,
) -> int:
    """Write the directory of a drafter, as `Trainable.save`; return the size of the weights in bytes."""
    stored = {
        key: value.detach().to("cpu", torch.bfloat16 if value.is_floating_point() else None).contiguous()
        for key, value in weights.items()
    }
    described = {
        "format": 1,
        "target": {"name": name, "fingerprint": identity["target"]},
        "tokenizer": {"fingerprint": identity["tokenizer"]},
        "measured": card,
    }
    text = (
        f"# Drafter for {name}\n\n{about} It shares the target's input embedding and tokenizer.\n\nTrained "
        "by `gammaray train` on text of the target. The weights derive from the target's, whose licence "
        f"applies.\n\nMeasured on held-out answers:\n\n```json\n{json.dumps(card, indent=1)}\n```\n"
    )
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(folder / "model.safetensors") as path:
                save_file(stored, path, metadata={"format": "pt"})
        except Exception as error:  # safetensors reports a full disk by an error class of its own
            raise OSError(f"model.safetensors: {error}") from error
        write_json(folder / "config.json", config)
        write_json(folder / "gammaray.json", described)
        (folder / "README.md").write_text(text, encoding="utf-8")
    return (folder / "model.safetensors").stat().st_size
