"""Hidden states of the target over stored answers: computed when first needed, then kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.program.files import replacing
from services.train.answers.store import Sequence, disk


class StateStore:
    """The states that enter some layers of a target, in a folder next to the answers.

    It has a folder for these layers, with JOB.npy for each answer: bfloat16 [tokens, taps, hidden_size], as
    int16. Tap j is the state that enters layer j of the target's `layers`; the number of layers stands for
    what enters its last `norm`.
    """

    def __init__(self, folder: Path, target: PreTrainedModel, taps: Items[int]) -> None:
        model: Any = target
        decoder = model.get_decoder()
        self._decoder, self._folder = decoder, folder / "-".join(map(str, taps))
        modules: list[nn.Module] = [*decoder.layers, decoder.norm]
        self._tapped = [(tap, modules[tap]) for tap in taps]
        with disk(folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def of(self, sequences: Items[Sequence]) -> list[Tensor]:
        """Return the states of sequences, bfloat16 [tokens, taps, hidden_size]."""
        if missing := [sequence for sequence in sequences if not self._path(sequence).exists()]:
            self._compute(missing)
        arrays = [np.load(self._path(sequence)) for sequence in sequences]
        return [torch.from_numpy(array).view(torch.bfloat16) for array in arrays]

    def _path(self, sequence: Sequence) -> Path:
        return self._folder / f"{sequence.number}.npy"

    @torch.no_grad()
    def _compute(self, sequences: Items[Sequence]) -> None:
        width = max(len(sequence.token_ids) for sequence in sequences)
        token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, sequence in zip(token_ids, sequences, strict=True):
            row[: len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids.astype("int64"))
        states_of: dict[int, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(recorder(states_of, tap), with_kwargs=True)
            for tap, module in self._tapped
        ]
        try:
            # Padding follows the text, to which a causal model does not attend.
            self._decoder(token_ids.to(next(self._decoder.parameters()).device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.stack([states_of[tap] for tap, _ in self._tapped], dim=2).to("cpu", torch.bfloat16)
        with disk(self._folder):
            for sequence, rows in zip(sequences, states, strict=True):
                with replacing(self._path(sequence)) as path, path.open("wb") as file:
                    np.save(file, rows[: len(sequence.token_ids)].view(torch.int16).numpy())


def recorder(states: dict[int, Tensor], tap: int) -> Callable[..., None]:
    """Return a hook that records what enters a module as the state of `tap`."""

    def record(_module: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        states[tap] = positional[0] if positional else named["hidden_states"]

    return record
