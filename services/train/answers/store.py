"""Answers of the target with its most likely tokens, on disk: one file per answer.

A folder holds files JOB-TOKENS-PROMPT-TEMPERATURE.npz: the number of the job, of all tokens and of the
prompt's tokens, and the temperature times 1000. A file is written under another name and renamed,
so that a process that is killed while writing loses the answer that it was writing and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gammaray.errors import FailedPreconditionError, ResourceExhaustedError
from gammaray.program.files import replacing

_Array = NDArray[Any]

TOP_K = 32
"""The target's most likely ids that a drafter learns from, at most."""


@dataclass(frozen=True)
class Sequence:
    """A prompt and its answer."""

    token_ids: _Array  # prompt, then answer, int32 [tokens]
    num_prompt: int  # length of the prompt; at least 1
    temperature: float  # at which the answer was drawn; 0 is greedy
    top_ids: _Array  # per answer token, the most likely ids at its place [answer tokens, top_k]
    top_logs: _Array  # their log-probabilities at temperature 1, float16 [answer tokens, top_k]
    number: int = 0  # of its job

    @property
    def num_answer(self) -> int:
        return len(self.token_ids) - self.num_prompt


class AnswerStore:
    """The sequences in a folder, and the numbers of their jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
        names = [_parsed(path) for path in folder.glob("[0-9]*.npz")]
        self.jobs = {number for number, _, _, _ in names}
        self.num_answer_tokens = sum(length - num_prompt for _, length, num_prompt, _ in names)

    def append(self, sequence: Sequence) -> None:
        """Store one sequence; where the disk is full, the stored ones stay intact."""
        temperature = round(1000 * sequence.temperature)
        name = f"{sequence.number}-{len(sequence.token_ids)}-{sequence.num_prompt}-{temperature}.npz"
        with disk(self.folder), replacing(self.folder / name) as path, path.open("wb") as file:
            np.savez(
                file,
                token_ids=sequence.token_ids.astype(np.int32),
                top_ids=sequence.top_ids.astype(np.int32),
                top_logs=sequence.top_logs.astype(np.float16),
            )
        self.jobs.add(sequence.number)
        self.num_answer_tokens += sequence.num_answer

    def sequences(self) -> Iterator[Sequence]:
        """Yield the stored sequences in order of their jobs."""
        for path in sorted(self.folder.glob("[0-9]*.npz"), key=_parsed):
            number, _, num_prompt, temperature = _parsed(path)
            with np.load(path) as stored:
                arrays = {name: stored[name] for name in ("token_ids", "top_ids", "top_logs")}
            yield Sequence(num_prompt=num_prompt, temperature=temperature / 1000, number=number, **arrays)


def _parsed(path: Path) -> tuple[int, int, int, int]:
    number, length, num_prompt, temperature = map(int, path.stem.split("-"))
    return number, length, num_prompt, temperature


def write_json(path: Path, value: object) -> None:
    """Write a file that is either the old or the new one, whatever happens."""
    with replacing(path) as new:
        new.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextmanager
def disk(folder: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into an error that names the folder and says what is kept."""
    try:
        yield
    except OSError as error:
        raise ResourceExhaustedError(
            f"cannot write to {folder}: {error.strerror or error}; what was stored is kept, and the same "
            "command continues from there"
        ) from error


def check_meta(path: Path, meta: dict[str, str]) -> None:
    """Write what the files of a folder depend on, or check that it is what was written."""
    if not path.exists():
        write_json(path, meta)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise FailedPreconditionError(f"{path} is damaged: delete {path.parent} to begin again")
    for key, value in meta.items():
        if stored.get(key) != value:
            mismatch = f"{path} says {key} {stored.get(key)!r}, not {value!r}"
            raise FailedPreconditionError(f"{mismatch}: use another --work, or delete {path.parent}")
