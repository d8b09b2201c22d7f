"""Finished streams with the target's hidden states, kept on the target worker's own machine.

A worker buffers the states of the newest positions of each session, which its head reads anyway. When a
session ends and its tenant agreed, a thread writes tokens and states to a file; the oldest files are deleted
when all of them exceed a bound. Log-probabilities are not stored: they follow from the last hidden state.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gammaray.learning.folder import RecordName
from services.scheduling.sessions import SessionCopy

MAX_POSITIONS = 640
"""Newest positions of a session that are kept."""

MIN_ANSWER = 16
"""Shorter completions are not kept."""

MAX_BYTES = 256 << 20
"""Of all files of one drafter."""

MAX_AGE_S = 24 * 3600
"""Age at which a stream is deleted."""

_WAITING = 64
"""Streams that wait for the disk at most; others are lost."""

_log = logging.getLogger(__name__)


@dataclass
class Buffer:
    """The states of a session's newest positions, without gaps.

    Attributes:
        end: Position after the last one.
        parts: States [positions, taps, hidden_size], in order.
    """

    end: int = 0
    parts: list[Tensor] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Position of the first one."""
        return self.end - sum(map(len, self.parts))

    def take(self, start: int, states: Tensor) -> None:
        """Add states; they replace those of the same positions and all later ones."""
        if start != self.end:
            first, kept = self.start, torch.cat(self.parts) if self.parts else states[:0]
            self.parts = [kept[: start - first]] if first < start <= self.end else []
        self.parts.append(states[-MAX_POSITIONS:].to("cpu", torch.bfloat16, copy=True))
        self.end = start + len(states)
        while self.end - self.start - len(self.parts[0]) >= MAX_POSITIONS:
            del self.parts[0]

    def states(self) -> tuple[int, Tensor]:
        """Return the first position, and the states [positions, taps, hidden_size]."""
        return self.start, torch.cat(self.parts)


class Recorder:
    """Writes finished streams to files, in a thread of its own.

    Args:
        max_bytes: Bound of the files of one drafter.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, folder: Path, tenant: str, session: SessionCopy, buffer: Buffer) -> None:
        """Write an ended session's stream, unless too many wait for the disk."""
        if self._waiting.qsize() >= _WAITING:
            _log.warning("the disk is too slow: a stream is not learnt from")
            return
        self._waiting.put(partial(self._write, folder, tenant, session, buffer))

    def forget(self, folder: Path, session_id: str) -> None:
        """Delete the streams of a session, those that wait for the disk, too."""
        self._waiting.put(partial(_forget, folder, session_id))

    def trim(self, folder: Path) -> None:
        """Delete the streams that are too old."""
        self._waiting.put(partial(self._trim, folder))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except Exception:  # serving goes on, and so does this thread
                _log.exception("a stream cannot be kept")

    def _write(self, folder: Path, tenant: str, session: SessionCopy, buffer: Buffer) -> None:
        start, states = buffer.states()
        # Each state predicts the token after it; that of the last token, if it is there, predicts none.
        states = states[: max(0, len(session.tokens) - 1 - start)]
        dropped = max(0, len(states) - MAX_POSITIONS)
        start, states = start + dropped, states[dropped:]
        tokens = session.tokens[start : start + len(states) + 1]
        num_prompt = max(1, session.spec.prompt_length - start)
        if (num_answer := len(tokens) - num_prompt) < MIN_ANSWER:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / str(RecordName(time.time_ns(), tenant, _digest(session.session_id), num_answer))
        temporary = path.with_suffix(".new")
        with temporary.open("wb") as file:
            np.savez(
                file,
                token_ids=np.asarray(tokens, dtype=np.int32),
                num_prompt=num_prompt,
                temperature=session.spec.params.temperature,
                states=states.view(torch.int16).numpy(),
            )
        temporary.replace(path)
        self._trim(folder)

    def _trim(self, folder: Path) -> None:
        files = sorted(folder.glob("*.npz"), key=RecordName.parse)
        oldest = time.time_ns() - MAX_AGE_S * 10**9
        while files and RecordName.parse(files[0]).written_at < oldest:
            files.pop(0).unlink(missing_ok=True)
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files, sizes, strict=True):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= size


def _forget(folder: Path, session_id: str) -> None:
    digest = _digest(session_id)
    for path in folder.glob("*.npz"):
        if RecordName.parse(path).session == digest:
            path.unlink(missing_ok=True)


def _digest(session_id: str) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]
