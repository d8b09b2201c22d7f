"""Training batches: answers of the target, and the places whose tokens a drafter predicts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from services.train.answers.store import Sequence

_WINDOWS = 0.5
"""Share of the answers of which a head sees no states before a random place, as after a lost cache."""


@dataclass(frozen=True)
class Batch:
    """Inputs and what the target expects."""

    token_ids: Tensor  # int64 [sequences, tokens], padded at the end
    starts: Tensor  # position of each sequence's first token here, int64 [sequences]; 0 but for windows
    # Sequence, anchor and depth (from 1) of each prediction, by depth, int64 [predictions, 3]: the token at
    # anchor + depth, predicted after those up to anchor + depth - 1; of a head from the state at anchor - 1.
    place: Tensor
    labels: Tensor  # token of the answer at the predicted place, int64 [predictions]
    top_ids: Tensor  # the target's most likely ids there, int64 [predictions, top_k]
    top_logs: Tensor  # their log-probabilities at temperature 1, float32 [predictions, top_k]
    # The target's hidden states for a head, bfloat16 [sequences, tokens, taps, hidden_size]; of a draft model
    # without taps.
    states: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def build_batch(
    sequences: Items[Sequence],
    num_depths: int,
    states: Items[Tensor] | None = None,
    generator: torch.Generator | None = None,
) -> Batch:
    """Return a batch, with the target's states of each sequence, [tokens, taps, hidden_size], for a head.

    The `generator` chooses windows; None: each sequence is whole.
    """
    starts = [0 if generator is None else _start(sequence, generator) for sequence in sequences]
    width = max(len(sequence.token_ids) - start for sequence, start in zip(sequences, starts, strict=True))
    token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
    size = (0, 0) if states is None else states[0].shape[1:]
    padded = torch.zeros(len(sequences), width, *size, dtype=torch.bfloat16)
    for number, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        length = len(sequence.token_ids) - start
        token_ids[number, :length] = torch.from_numpy(sequence.token_ids[start:].astype("int64"))
        if states is not None:
            padded[number, :length] = states[number][start:]
    place, labels, ids, logs = [], [], [], []
    for depth in range(1, num_depths + 1):
        for number, sequence in enumerate(sequences):
            end = len(sequence.token_ids)
            first = starts[number] + depth + (states is not None)  # a head needs the state before the anchor
            label = torch.arange(min(end, max(sequence.num_prompt, first)), end)
            anchor = label - depth
            numbers, depths = torch.full_like(anchor, number), torch.full_like(anchor, depth)
            place.append(torch.stack((numbers, anchor, depths), 1))
            answer = label.numpy() - sequence.num_prompt
            labels.append(torch.from_numpy(sequence.token_ids[label.numpy()].astype("int64")))
            ids.append(torch.from_numpy(sequence.top_ids[answer].astype("int64")))
            logs.append(torch.from_numpy(sequence.top_logs[answer].astype("float32")))
    return Batch(
        token_ids=token_ids,
        starts=torch.tensor(starts),
        place=torch.cat(place),
        labels=torch.cat(labels),
        top_ids=torch.cat(ids),
        top_logs=torch.cat(logs),
        states=padded,
    )


def _start(sequence: Sequence, generator: torch.Generator) -> int:
    """Return the first position of which the head sees the states; at least half of the answer follows."""
    most = sequence.num_prompt + (len(sequence.token_ids) - sequence.num_prompt) // 2
    is_window, place = torch.rand(2, generator=generator).tolist()
    return int(place * most) if is_window < _WINDOWS else 0
