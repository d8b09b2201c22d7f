"""Hidden states of the target over stored answers, on disk."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gammaray.program.files import replacing
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.train.answers.store import Sequence, disk


class StateStore:
    """The states `taps`, see `Engine.tap`, of a target, in a folder next to the answers.

    It has a folder for these taps, with JOB.npy for each answer: bfloat16 [tokens, taps, hidden_size], as
    int16. `load` loads the target where answers have no states: those of another choice of taps.
    """

    def __init__(self, folder: Path, load: Callable[[], Engine], taps: Items[int]) -> None:
        self.taps, self._load, self._folder = tuple(taps), load, folder / "-".join(map(str, taps))
        with disk(folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def add(self, number: int, states: Tensor) -> None:
        """Store the states of a job's answer, [tokens, taps, hidden_size]."""
        with disk(self._folder), replacing(self._file(number)) as path, path.open("wb") as file:
            np.save(file, states.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy())

    def of(self, sequences: Items[Sequence]) -> list[Tensor]:
        """Return the states of sequences, bfloat16 [tokens, taps, hidden_size]."""
        for missing in (s for s in sequences if not self._file(s.number).exists()):
            self._engine.step([SequenceInput("states", 0, missing.token_ids.tolist(), 0)])
            self.add(missing.number, self._engine.taps[0])
            self._engine.release("states")
        arrays = [np.load(self._file(s.number), mmap_mode="c")[: len(s.token_ids)] for s in sequences]
        return [torch.from_numpy(array).view(torch.bfloat16) for array in arrays]

    @cached_property
    def _engine(self) -> Engine:
        engine = self._load()
        engine.tap(self.taps)
        return engine

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.npy"
