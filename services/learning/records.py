"""Finished streams, kept on the worker's own machine.

When a session ends and its tenant agreed, a thread writes its tokens to a file; the oldest files are deleted
when all of them exceed a bound. For a head a target worker writes the hidden states of the newest positions,
too, which it buffers as the head reads them anyway. Log-probabilities are not stored: they follow from the
last hidden state. Draft models learn from the tokens alone.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gammaray.learning.folder import RecordName, stored_streams
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
    """Writes finished streams to files, at most `MAX_BYTES` of one drafter, in a thread of its own."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, folder: Path, tenant: str, session: SessionCopy, buffer: Buffer | None = None) -> None:
        """Write an ended session's stream, unless too many wait for the disk; a head's with its states."""
        if self._waiting.qsize() >= _WAITING:
            _log.warning("the disk is too slow: a stream is not learnt from")
            return
        self._waiting.put(partial(self._write, folder, tenant, session, buffer))

    def forget(self, folder: Path, session_id: str) -> None:
        """Delete the streams of a session, those that wait for the disk, too."""
        self._waiting.put(partial(_forget, folder, session_id))

    def trim(self, folder: Path, tenants: Collection[str]) -> None:
        """Delete the streams that are too old, and those of other tenants than these."""
        self._waiting.put(partial(self._trim, folder, tenants))

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            try:
                work()
            except OSError as error:
                _log.warning("a stream cannot be kept: %s", error)
            except Exception:  # serving goes on, and so does this thread
                _log.exception("a stream cannot be kept")

    def _write(self, folder: Path, tenant: str, session: SessionCopy, buffer: Buffer | None) -> None:
        start, states = (0, None) if buffer is None else buffer.states()
        # Each state predicts the token after it; that of the last token, if it is there, predicts none.
        last = len(session.tokens) - 1
        end = last if states is None else min(last, start + len(states))
        first = max(start, end - MAX_POSITIONS)
        tokens = session.tokens[first : end + 1]
        num_prompt = max(1, session.spec.prompt_length - first)
        if (num_answer := len(tokens) - num_prompt) < MIN_ANSWER:
            return
        stored: dict[str, Any] = {}
        if states is not None:
            stored["states"] = states[first - start : end - start].view(torch.int16).numpy()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / str(RecordName(time.time_ns(), tenant, _digest(session.session_id), num_answer))
        temporary = path.with_suffix(".new")
        try:
            with temporary.open("wb") as file:
                np.savez(
                    file,
                    token_ids=np.asarray(tokens, dtype=np.int32),
                    num_prompt=num_prompt,
                    temperature=session.spec.params.temperature,
                    **stored,
                )
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._trim(folder)

    def _trim(self, folder: Path, tenants: Collection[str] | None = None) -> None:
        oldest, files = time.time_ns() - MAX_AGE_S * 10**9, []
        for path in sorted(stored_streams(folder), key=RecordName.parse):
            name = RecordName.parse(path)
            if name.written_at < oldest or (tenants is not None and name.tenant not in tenants):
                path.unlink(missing_ok=True)
            else:
                files.append(path)
        sizes = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, size in zip(files, sizes, strict=True):
            if total <= MAX_BYTES:
                return
            path.unlink(missing_ok=True)
            total -= size


def _forget(folder: Path, session_id: str) -> None:
    digest = _digest(session_id)
    for path in stored_streams(folder):
        if RecordName.parse(path).session == digest:
            path.unlink(missing_ok=True)


def _digest(session_id: str) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]
