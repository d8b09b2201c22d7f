"""Hidden states of the target over stored answers: computed when first needed, then kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from gammaray.errors import FailedPreconditionError
from services.train.answers.store import Sequence, disk, write_json


class StateStore:
    """The states that enter some layers of a target, bfloat16, beside the answers.

    A folder holds `states.json`, `states.bin` [tokens, taps, hidden_size], and `states_done.bin`, whether
    those of a sequence are there. The files are sparse: what was not computed takes no space.

    Args:
        folder: Of the answers.
        identity: What the states depend on, such as the target's fingerprint.
        target: The model that computes them, with its layers in `layers` and its last norm in `norm`.
        taps: j for the state that enters layer j, the number of layers for the one that enters the last norm.
        num_tokens: Tokens of all stored sequences.
        num_sequences: Number of stored sequences.

    Raises:
        FailedPreconditionError: The folder holds states of another target or of other layers.
        ResourceExhaustedError: The disk is full.
    """

    def __init__(
        self,
        folder: Path,
        identity: dict[str, str],
        target: PreTrainedModel,
        taps: Items[int],
        num_tokens: int,
        num_sequences: int,
    ) -> None:
        model: Any = target
        decoder = model.get_decoder()
        self._decoder, self._folder = decoder, folder
        modules: list[nn.Module] = [*decoder.layers, decoder.norm]
        self._tapped = [(tap, modules[tap]) for tap in taps]
        self.hidden_size = int(target.config.hidden_size)
        meta = {"taps": list(taps), "hidden_size": self.hidden_size, **identity}
        with disk(folder):
            if not (folder / "states.json").exists():
                write_json(folder / "states.json", meta)
            _check_meta(folder / "states.json", meta)
            shape = (num_tokens, len(taps), self.hidden_size)
            self._states = _grown(folder / "states.bin", np.dtype(np.int16), shape)
            self._is_done = _grown(folder / "states_done.bin", np.dtype(np.uint8), (num_sequences,))

    def of(self, sequences: Items[Sequence]) -> list[Tensor]:
        """Return the states of sequences, bfloat16 [tokens, taps, hidden_size].

        Raises:
            ResourceExhaustedError: The disk is full.
        """
        missing = [one for one in sequences if not self._is_done[one.number]]
        if missing:
            self._compute(missing)
        return [
            torch.from_numpy(self._states[one.offset : one.offset + len(one.token_ids)].copy()).view(
                torch.bfloat16
            )
            for one in sequences
        ]

    @torch.no_grad()
    def _compute(self, sequences: Items[Sequence]) -> None:
        width = max(len(one.token_ids) for one in sequences)
        token_ids = torch.zeros(len(sequences), width, dtype=torch.long)
        for row, one in zip(token_ids, sequences, strict=True):
            row[: len(one.token_ids)] = torch.from_numpy(one.token_ids.astype("int64"))
        found: dict[int, Tensor] = {}
        hooks = [
            module.register_forward_pre_hook(_recorder(found, tap), with_kwargs=True)
            for tap, module in self._tapped
        ]
        try:
            # Padding is behind the text, where a causal model does not look.
            self._decoder(token_ids.to(next(self._decoder.parameters()).device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.stack([found[tap] for tap, _ in self._tapped], dim=2).to("cpu", torch.bfloat16)
        with disk(self._folder):
            for one, rows in zip(sequences, states, strict=True):
                count = len(one.token_ids)
                self._states[one.offset : one.offset + count] = rows[:count].view(torch.int16).numpy()
                self._is_done[one.number] = 1


def _recorder(found: dict[int, Tensor], tap: int) -> Callable[..., None]:
    def record(_module: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        found[tap] = given[0] if given else named["hidden_states"]

    return record


def _check_meta(path: Path, meta: dict[str, Any]) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    for key, value in meta.items():
        got = found.get(key) if isinstance(found, dict) else None
        if got != value:
            raise FailedPreconditionError(
                f"{path} says {key} {got!r}, not {value!r}: use another --work, or delete the states there"
            )


def _grown(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return a memory map of a file, which keeps what it holds and grows by zeros."""
    size = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    with path.open("ab") as file:
        if file.tell() != size:
            file.truncate(size)
    return np.memmap(path, kind, "r+", shape=shape)
