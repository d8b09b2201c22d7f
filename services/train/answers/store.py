"""Answers of the target with its most likely tokens, on disk: append-only files, read through memory maps.

A folder holds, besides `meta.json`:

| file | one entry | contents |
|---|---|---|
| `tokens.bin` | int32 | token ids of prompts and answers, one sequence after the other |
| `top_ids.bin` | top_k x uint16 or int32 | per answer token, the likeliest ids at its place, descending |
| `top_logs.bin` | top_k x float16 | their log-probabilities at temperature 1 |
| `logs.bin` | float32 | log-probability of the answer token itself at temperature 1 |
| `index.bin` | 5 x int64 | per sequence: job, tokens, prompt tokens, temperature x 1000, format |

The index is written last. Opening the folder cuts the other files to what the index covers, so a process that
is killed while writing loses the sequence that it was writing and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gammaray.errors import FailedPreconditionError, ResourceExhaustedError

_FORMAT = 1
_RECORD = 5
_Array = NDArray[Any]


@dataclass(frozen=True)
class Sequence:
    """A prompt and its answer; arrays are views of memory maps.

    Attributes:
        token_ids: Prompt, then answer, int32 [tokens].
        num_prompt: Length of the prompt; at least 1.
        temperature: At which the answer was drawn; 0 is greedy.
        top_ids: Per answer token, the most likely ids at its place [answer tokens, top_k].
        top_logs: Their log-probabilities at temperature 1, float16 [answer tokens, top_k].
        logs: Log-probability of each answer token at temperature 1, float32 [answer tokens].
        number: Place among the stored sequences.
        offset: Tokens of all sequences before it.
    """

    token_ids: _Array
    num_prompt: int
    temperature: float
    top_ids: _Array
    top_logs: _Array
    logs: _Array
    number: int = 0
    offset: int = 0


class AnswerStore:
    """The sequences in a folder.

    Args:
        folder: Created if it does not exist.
        identity: What the sequences depend on, such as the target's fingerprint.
        top_k: Ids stored per answer token.
        vocab_size: Ids lie below it.

    Raises:
        FailedPreconditionError: The folder holds sequences of another target.
        ResourceExhaustedError: The disk is full.
    """

    def __init__(self, folder: Path, identity: dict[str, str], top_k: int, vocab_size: int) -> None:
        self.folder = folder
        kind = np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
        self._files = {
            "tokens": (np.dtype(np.int32), ()),
            "top_ids": (kind, (top_k,)),
            "top_logs": (np.dtype(np.float16), (top_k,)),
            "logs": (np.dtype(np.float32), ()),
        }
        meta = {"format": _FORMAT, "top_k": top_k, "id_type": kind.name, **identity}
        with disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "meta.json").exists():
                write_json(folder / "meta.json", meta)
            _check_meta(folder, meta)
            self._index = self._recover()
        self._open: dict[str, BinaryIO] = {}

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_answer_tokens(self) -> int:
        """Answer tokens stored."""
        return int((self._index[:, 1] - self._index[:, 2]).sum())

    @property
    def num_tokens(self) -> int:
        """Tokens stored, of prompts and answers."""
        return int(self._index[:, 1].sum())

    @property
    def jobs(self) -> set[int]:
        """Numbers of the stored sequences' jobs."""
        return set(self._index[:, 0].tolist())

    def append(self, job: int, sequence: Sequence) -> None:
        """Store one sequence.

        Raises:
            ResourceExhaustedError: The disk is full; the stored sequences are intact.
        """
        parts = {
            "tokens": sequence.token_ids,
            "top_ids": sequence.top_ids,
            "top_logs": sequence.top_logs,
            "logs": sequence.logs,
        }
        record = [
            job,
            len(sequence.token_ids),
            sequence.num_prompt,
            round(1000 * sequence.temperature),
            _FORMAT,
        ]
        with disk(self.folder):
            for name, (kind, _) in self._files.items():
                self._write(name, np.ascontiguousarray(parts[name], dtype=kind))
            self._write("index", np.array(record, dtype=np.int64))
        self._index = np.concatenate([self._index, np.array([record])])

    def sequences(self) -> Iterator[Sequence]:
        """Yield the stored sequences in order."""
        if not len(self):
            return
        maps = {
            name: np.memmap(self._path(name), kind, "r").reshape(-1, *shape)
            for name, (kind, shape) in self._files.items()
        }
        token = row = 0
        for number, (_, length, num_prompt, temperature, _) in enumerate(self._index.tolist()):
            rows = slice(row, row + length - num_prompt)
            yield Sequence(
                maps["tokens"][token : token + length],
                num_prompt,
                temperature / 1000,
                maps["top_ids"][rows],
                maps["top_logs"][rows],
                maps["logs"][rows],
                number,
                token,
            )
            token, row = token + length, rows.stop

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _write(self, name: str, values: _Array) -> None:
        if name not in self._open:
            self._open[name] = self._path(name).open("ab", buffering=0)
        data, file = values.tobytes(), self._open[name]
        while data:  # an unbuffered write may be short
            data = data[file.write(data) :]

    def _recover(self) -> _Array:
        """Return the index of the sequences that are whole, after cutting the files to them."""
        for name in ("index", *self._files):
            self._path(name).touch()
        size = self._path("index").stat().st_size // (8 * _RECORD) * _RECORD
        index = np.fromfile(self._path("index"), np.int64, size).reshape(-1, _RECORD)
        tokens = index[:, 1].cumsum()
        rows = (index[:, 1] - index[:, 2]).cumsum()
        whole = len(index)
        for name, (kind, shape) in self._files.items():
            entry = kind.itemsize * int(np.prod(shape, dtype=int))
            ends = (tokens if name == "tokens" else rows) * entry
            whole = min(whole, int((ends <= self._path(name).stat().st_size).sum()))
        for name, (kind, shape) in self._files.items():
            entry = kind.itemsize * int(np.prod(shape, dtype=int))
            count = (tokens if name == "tokens" else rows)[whole - 1] if whole else 0
            os.truncate(self._path(name), int(count) * entry)
        os.truncate(self._path("index"), whole * 8 * _RECORD)
        return index[:whole]


def write_json(path: Path, value: object) -> None:
    """Write a file that is either the old or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


class disk:
    """Turns an OSError, such as a full disk, into an error that names the folder and says what is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise ResourceExhaustedError(
                f"cannot write to {self._folder}: {error.strerror or error}; what was stored is kept, and "
                "the same command continues from there"
            ) from error


def _check_meta(folder: Path, meta: dict[str, Any]) -> None:
    try:
        found = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FailedPreconditionError(f"{folder / 'meta.json'} is damaged: delete {folder} to begin again")
    for key, value in meta.items():
        if found.get(key) != value:
            raise FailedPreconditionError(
                f"{folder} holds answers with {key} {found.get(key)!r}, not {value!r}: use another "
                "folder, or delete this one"
            )
