"""Drafters in training that read the target's hidden states, and their batches."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.train.answers.states import StateStore
from services.train.answers.store import Sequence
from services.train.drafter import Drafter
from services.train.losses import loss_of

__all__ = ["AnyDrafter", "FeatureDrafter", "FixedRows", "HeadBatch", "head_card"]

STEP_WEIGHT = 0.8
"""Weight of a depth's loss relative to the one before, as a depth counts only if those before were right."""

_WINDOWS = 0.5
"""Share of the answers of which a head sees no states before a random place, as after a lost cache."""


@dataclass(frozen=True)
class HeadBatch:
    """Inputs and what the target expects.

    Attributes:
        token_ids: int64 [sequences, tokens], padded behind.
        starts: Position of each sequence's first token here, int64 [sequences]; 0 but for windows.
        states: bfloat16 [sequences, tokens, taps, hidden_size].
        place: Sequence, anchor and depth (from 1) of each prediction, by depth, int64 [predictions, 3]: the
            token at anchor + depth, from the state at anchor - 1.
        labels: Token of the answer at the predicted place, int64 [predictions].
        top_ids: The target's most likely ids there, int64 [predictions, top_k].
        top_logs: Their log-probabilities at temperature 1, float32 [predictions, top_k].
    """

    token_ids: Tensor
    starts: Tensor
    states: Tensor
    place: Tensor
    labels: Tensor
    top_ids: Tensor
    top_logs: Tensor


class FeatureDrafter(nn.Module):
    """Predicts the tokens of several depths from the target's hidden states.

    Args:
        taps: The states that it reads, see `StateStore`.
        hidden_size: Width of each.
        vocab_size: Number of the target's token ids.
        target_ids: Ascending ids of the output's rows.
        depth: Depths that are evaluated.
        states: Where states are read.

    Attributes:
        num_steps: Depths that are trained.
    """

    def __init__(
        self,
        taps: Items[int],
        hidden_size: int,
        vocab_size: int,
        target_ids: Tensor,
        depth: int,
        states: StateStore,
    ) -> None:
        super().__init__()
        self._size = (len(taps), hidden_size)
        self.depth, self._states = depth, states
        self.num_steps = 1
        self.target_ids: Tensor
        self.row_of: Tensor
        self.register_buffer("target_ids", target_ids)
        row_of = torch.full((vocab_size,), -1)
        row_of[target_ids] = torch.arange(len(target_ids))
        self.register_buffer("row_of", row_of, persistent=False)

    @property
    @abstractmethod
    def head(self) -> Tensor:
        """The output matrix, [rows, hidden_size]."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """Number of weights that one forward of drafting reads."""

    @abstractmethod
    def forward(self, batch: HeadBatch) -> Tensor:
        """Return log-probabilities of each prediction, float32 [predictions, rows of the output]."""

    @abstractmethod
    def start_from(self, init: str, target: str) -> None:
        """Take the weights and the output's ids of a trained one.

        Args:
            init: Its directory.
            target: The target's directory or hub name.

        Raises:
            InvalidArgumentError: It has another shape, or reads other states.
            UnsupportedModelError: It is not of this kind, or not for the target.
        """

    @abstractmethod
    def save(self, folder: Path, identity: dict[str, str], name: str, card: dict[str, Any]) -> int:
        """Write a directory in the published format, in bfloat16; files are replaced, the weights first.

        Args:
            folder: The directory.
            identity: Fingerprints of the target and of its tokenizer.
            name: The target's name.
            card: The measurements.

        Returns:
            Size of the weights in bytes.

        Raises:
            ResourceExhaustedError: The disk is full; what the directory held is intact.
        """

    def take_ids(self, ids: Tensor) -> None:
        """Take the output's ids of another drafter with as many."""
        self.target_ids.copy_(ids)
        self.row_of.fill_(-1)
        self.row_of[ids] = torch.arange(len(ids))

    def batch(
        self, sequences: Items[Sequence], *, keep: float = 0.0, generator: torch.Generator | None = None
    ) -> HeadBatch:
        """Return a batch for `num_steps` depths; `keep` 1 for all `depth` that are evaluated.

        Args:
            sequences: Answers with their prompts.
            keep: 1: all of each sequence.
            generator: Chooses windows; None: there are none.
        """
        count = self.depth if keep == 1.0 else self.num_steps
        starts = [0 if generator is None else _start(one, generator) for one in sequences]
        width = max(len(one.token_ids) - start for one, start in zip(sequences, starts, strict=True))
        token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
        states = torch.zeros((len(sequences), width, *self._size), dtype=torch.bfloat16)
        for number, (one, found) in enumerate(zip(sequences, self._states.of(sequences), strict=True)):
            start, length = starts[number], len(found) - starts[number]
            token_ids[number, :length] = torch.from_numpy(one.token_ids[start:].astype("int64"))
            states[number, :length] = found[start:]
        place, labels, ids, logs = [], [], [], []
        for depth in range(1, count + 1):
            for number, one in enumerate(sequences):
                end = len(one.token_ids)
                label = torch.arange(min(end, max(one.num_prompt, starts[number] + depth + 1)), end)
                anchor = label - depth
                place.append(
                    torch.stack((torch.full_like(anchor, number), anchor, torch.full_like(anchor, depth)), 1)
                )
                answer = label.numpy() - one.num_prompt
                labels.append(torch.from_numpy(one.token_ids[label.numpy()].astype("int64")))
                ids.append(torch.from_numpy(one.top_ids[answer].astype("int64")))
                logs.append(torch.from_numpy(one.top_logs[answer].astype("float32")))
        joined = (torch.cat(part) for part in (place, labels, ids, logs))
        return HeadBatch(token_ids, torch.tensor(starts), states, *joined)

    def common(self, batch: HeadBatch, logs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the target's probabilities and the drafter's log-probabilities of the target's top ids.

        Both are [predictions, top_k]; an id without a row has the target's probability 0.
        """
        rows = self.row_of[batch.top_ids]
        return batch.top_logs.exp() * (rows >= 0), logs.gather(1, rows.clamp_min(0))

    def loss(self, batch: HeadBatch, kind: str) -> Tensor:
        """Return the mean loss, in which later depths count less; `kind` as in `losses.loss_of`."""
        return self._mean(batch, self._each(batch, self(batch), kind))

    def _each(self, batch: HeadBatch, logs: Tensor, kind: str) -> Tensor:
        """Return the loss of each prediction."""
        return loss_of(kind, *self.common(batch, logs))

    def _mean(self, batch: HeadBatch, each: Tensor) -> Tensor:
        weight = STEP_WEIGHT ** (batch.place[:, 2] - 1).float()
        return (each * weight).sum() / weight.sum()


AnyDrafter = Drafter | FeatureDrafter


def head_card(kind: str, target: str, about: str, card: dict[str, Any]) -> str:
    """Return the README of a trained head.

    Args:
        kind: What it is.
        target: The target's name.
        about: What it reads and has.
        card: The measurements.
    """
    return (
        f"# {kind} for {target}\n\n{about}\n\nTrained by `gammaray train` on text of the target. The weights "
        "derive from the target's, whose licence applies.\n\n"
        f"Measured on held-out answers:\n\n```json\n{json.dumps(card, indent=1)}\n```\n"
    )


class FixedRows(nn.Module):
    """An embedding that is not trained and not saved."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.weight)


def _start(one: Sequence, generator: torch.Generator) -> int:
    """Return the first position of which the head sees the states; at least half of the answer follows."""
    most = one.num_prompt + (len(one.token_ids) - one.num_prompt) // 2
    is_window, place = torch.rand(2, generator=generator).tolist()
    return int(place * most) if is_window < _WINDOWS else 0
