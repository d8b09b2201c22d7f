"""Finished streams, kept on the worker's own machine.

When a session ends and its tenant agreed, a thread writes its tokens to a file, with the hidden states of the
newest positions, which are buffered as the head reads them anyway. Log-probabilities are not stored: they
follow from the last hidden state. The thread knows the files of each folder, so that one more costs the same
whatever is kept. Other processes' files, age and withdrawn consents are looked at once a minute, in pieces:
the engine of this process never waits for a millisecond of it.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gammaray.learning.folder import RecordName, stored_streams
from gammaray.learning.private import make_folder, open_file
from services.scheduling.sessions import SessionCopy

MAX_POSITIONS = 640
"""Newest positions of a session that are kept."""

MIN_ANSWER = 16
"""Shorter completions are not kept."""

MAX_BYTES, MAX_FILES = 256 << 20, 1000
"""Of all files of one drafter."""

MAX_AGE_S, MAX_AHEAD_S = 24 * 3600, 60
"""Age at which a stream is deleted; one that is further in the future is, too, as the clock was wrong."""

_PIECE_S, _PAUSE_S = 0.0003, 0.002
"""Other threads run after each piece of work on many files."""

_WAITING = 64
"""Streams that wait for the disk at most; others are lost."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Buffer:
    """The states of a session's newest positions, without gaps."""

    end: int = 0  # position after the last one
    parts: list[Tensor] = field(default_factory=list)  # states [positions, taps, hidden_size], in order

    @property
    def start(self) -> int:
        """Position of the first one."""
        return self.end - sum(map(len, self.parts))

    def take(self, start: int, states: Tensor) -> None:
        """Add states; they replace those of the same positions and all later ones."""
        if start != self.end:
            first, buffered = self.start, torch.cat(self.parts) if self.parts else states[:0]
            self.parts = [buffered[: start - first]] if first < start <= self.end else []
        self.parts.append(states[-MAX_POSITIONS:].to("cpu", torch.bfloat16, copy=True))
        self.end = start + len(states)
        while self.end - self.start - len(self.parts[0]) >= MAX_POSITIONS:
            del self.parts[0]

    def states(self) -> tuple[int, Tensor]:
        """Return the first position, and the states [positions, taps, hidden_size]."""
        return self.start, torch.cat(self.parts)


@dataclass
class _Kept:
    """The files of a folder: the oldest are deleted when they exceed a bound."""

    files: list[tuple[float, Path, int]] = field(default_factory=list)
    size: int = 0

    def add(self, at: float, path: Path, size: int) -> None:
        heapq.heappush(self.files, (at, path, size))
        self.size += size
        while self.size > MAX_BYTES or len(self.files) > MAX_FILES:
            _, oldest, freed = heapq.heappop(self.files)
            self.size -= freed
            oldest.unlink(missing_ok=True)


class Recorder:
    """Writes finished streams to files, within the bounds of each drafter, in a thread of its own."""

    def __init__(self) -> None:
        self._kept: dict[Path, _Kept] = {}
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(
        self,
        folder: Path,
        tenant: str,
        session: SessionCopy,
        buffer: Buffer,
        is_allowed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Write an ended session's stream, unless too many wait; `is_allowed` is asked before and after."""
        if self._waiting.qsize() >= _WAITING:
            _log.warning("the disk is too slow: a stream is not learnt from")
            return
        self.then(partial(self._write, folder, tenant, session, buffer, is_allowed))

    def forget(self, folder: Path, session_id: str) -> None:
        """Delete the streams of a session, those that wait for the disk, too."""
        self.then(partial(_forget, folder, session_id))

    def trim(self, folder: Path, tenants: Collection[str] | None) -> None:
        """Delete the streams that are too old or too many, and those of other tenants than these."""
        self.then(partial(self._trim, folder, tenants))

    def then(self, work: Callable[[], None]) -> None:
        """Do something after all that was asked for before."""
        self._waiting.put(work)

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

    def _write(
        self, folder: Path, tenant: str, session: SessionCopy, buffer: Buffer, is_allowed: Callable[[], bool]
    ) -> None:
        start, states = buffer.states()
        # Each state predicts the token after it; that of the last token, if it is there, predicts none.
        end = min(len(session.tokens) - 1, start + len(states))
        first = max(start, end - MAX_POSITIONS)
        tokens = session.tokens[first : end + 1]
        num_prompt = max(1, session.spec.prompt_length - first)
        if (num_answer := len(tokens) - num_prompt) < MIN_ANSWER or not is_allowed():
            return
        if folder not in self._kept:
            self._trim(make_folder(folder))
        now = time.time_ns()
        path = folder / str(RecordName(now, tenant, _digest(session.session_id), num_answer))
        temporary = path.with_suffix(".new")
        try:
            with open_file(temporary) as file:
                np.savez(
                    file,
                    token_ids=np.asarray(tokens, dtype=np.int32),
                    num_prompt=num_prompt,
                    temperature=session.spec.params.temperature,
                    states=states[first - start : end - start].view(torch.int16).numpy(),
                )
                size = file.tell()
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._kept[folder].add(now / 1e9, path, size)
        if not is_allowed():  # withdrawn meanwhile: who deletes may not have seen the file
            path.unlink(missing_ok=True)

    def _trim(self, folder: Path, tenants: Collection[str] | None = None) -> None:
        now, kept = time.time(), _Kept()
        for path, size, at, name in _paced(stored_streams(folder)):
            is_other = tenants is not None and name is not None and name.tenant not in tenants
            if is_other or not now - MAX_AGE_S <= at <= now + MAX_AHEAD_S:
                path.unlink(missing_ok=True)
            else:
                kept.add(at, path, size)
        self._kept[folder] = kept


def _forget(folder: Path, session_id: str) -> None:
    digest = f"_{_digest(session_id)}_"
    for stream in _paced(stored_streams(folder)):
        if digest in stream.path.name:
            stream.path.unlink(missing_ok=True)


def _paced(items: Iterable[T]) -> Iterator[T]:
    """Yield from what takes long, and let other threads run between short pieces of it."""
    ends = time.perf_counter() + _PIECE_S
    for item in items:
        yield item
        if time.perf_counter() > ends:
            time.sleep(_PAUSE_S)
            ends = time.perf_counter() + _PIECE_S


def _digest(session_id: str) -> str:
    return hashlib.sha256(session_id.encode()).hexdigest()[:16]
