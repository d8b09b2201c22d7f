"""Checks grammars of users in processes with limits of CPU time, memory and duration.

llguidance cannot be interrupted, and its own limits do not bound all of its work: what a grammar costs is
known only once it has been compiled. So an untrusted grammar is first compiled in a process of its own,
together with its first masks, and only one that ends within the limits is compiled elsewhere: in the
orchestrator, for forced tokens, and in workers. What this costs there is bounded:

- The compilation is the same work, on the same input with the same limits of llguidance: at most the
  `MAX_CPU_S` and `MAX_MEMORY_BYTES` of the check. llguidance releases the GIL meanwhile.
- A step after that, for one token or mask, is bounded by llguidance's limits of a step (`matcher`), which it
  applies to each lexer state and each row. They do not bound a compilation, and they did not bound the
  intersections and complements of Lark, which `syntax` refuses by llguidance's own parse.

A process checks one grammar at a time. The grammar whose check ends it is refused, and no other one: its next
grammar gets a new process. A process starts from a fresh interpreter, as a copy of one with threads might
inherit locked locks.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gammaray.errors import CancelledError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from gammaray.grammar.check_process import write_line

MAX_CPU_S = 1.0
"""CPU time of the check of a grammar; ordinary ones take a few to 100 ms."""

MAX_MEMORY_BYTES = 256 * 2**20
"""Memory of a process beyond the tokenizer's."""

MAX_DURATION_S = 10.0
"""Duration of a check, which may have to wait for the CPU."""

START_S = 60.0
"""Duration of the start of a process, with the tokenizer."""

_POLL_S = 0.05
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "TMPDIR")

# Raised by the process's own memory limit, or by a fault of llguidance.
_FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)


class GrammarCheck:
    """One check; `cancel` ends it."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self._is_cancelled = threading.Event()

    def cancel(self) -> None:
        """End the check within `_POLL_S`; thread-safe."""
        self._is_cancelled.set()

    def check_wanted(self) -> None:
        """Raise CancelledError after `cancel`."""
        if self._is_cancelled.is_set():
            raise CancelledError("the check of the grammar was cancelled")


class CheckPool:
    """Up to `num_processes` processes, started when needed, that check grammars for one tokenizer.

    Thread-safe. `tokenizer_json` is in the format of `tokenizers`.
    """

    def __init__(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int], num_processes: int = 2
    ) -> None:
        self._settings = {
            "tokenizer": tokenizer_json,
            "vocab_size": vocab_size,
            "eos_token_ids": sorted(eos_token_ids),
            "max_cpu_s": MAX_CPU_S,
            "max_memory_bytes": MAX_MEMORY_BYTES,
        }
        self._idle: list[_Process] = []
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="gammaray-grammar-check")

    def submit(self, check: GrammarCheck) -> Future[float]:
        """Begin a check; the result is the seconds of CPU time that it took, or an error.

        A later step, for one token or mask, takes at most a few milliseconds or as long as the check.
        InvalidArgumentError if the grammar is wrong, unsupported, or exceeds the limits, or llguidance cannot
        use the tokenizer; ResourceExhaustedError if the check took too long without having used its CPU time;
        UnavailableError if the process was ended from outside, twice, or cannot be started.
        """
        return self._threads.submit(self._run, check)

    def close(self) -> None:
        """End the processes; checks that wait or run fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    def _run(self, check: GrammarCheck) -> float:
        for is_last in (False, True):
            check.check_wanted()
            try:
                process = self._idle.pop()
            except IndexError:
                process = _Process(self._settings)
            try:
                error, cpu_s = process.ask(check)
            except _EndedError as ended:
                if ended.by_signal == signal.SIGPROF:
                    raise _too_complex(f"takes more than {MAX_CPU_S:g} s of CPU time") from None
                if is_last and ended.by_signal in _FAULTS:
                    raise _too_complex(f"fails, with {MAX_MEMORY_BYTES // 2**20} MiB of memory") from None
                if is_last:
                    raise UnavailableError(
                        f"the process that checks grammars ended twice ({ended})"
                    ) from None
            except BaseException:
                if process.is_idle:
                    self._idle.append(process)
                else:
                    process.end()
                raise
            else:
                self._idle.append(process)
                if error is not None:
                    raise InvalidArgumentError("grammar", *error)
                return cpu_s
        raise AssertionError


def _too_complex(what: str) -> InvalidArgumentError:
    return InvalidArgumentError("grammar", f"a grammar whose check {what}", "a grammar of less complexity")


class _EndedError(Exception):
    """A process ended: by the signal of this number, or otherwise with 0."""

    def __init__(self, returncode: int) -> None:
        self.by_signal = max(0, -returncode)
        super().__init__(f"signal {self.by_signal}" if self.by_signal else f"exit status {returncode}")


class _Process:
    """A process of `check_process`, used by one thread at a time; when idle, it waits for a grammar."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # Without the settings of the parent, which may be secret; `subprocess` does not copy its memory.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "gammaray.grammar.check_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        except OSError as error:  # no descriptor, process or memory is left
            raise UnavailableError(f"the process that checks grammars does not start: {error}") from error
        self._settings: dict[str, Any] | None = settings
        self.is_idle = False

    def ask(self, check: GrammarCheck) -> tuple[list[str] | None, float]:
        """Return a grammar's error, as got and allowed, and the check's CPU time; raises `_EndedError`."""
        if self._settings is not None:
            self._write(self._settings)
            # Not cancelled with the check, as the next one would begin anew.
            if error := self._read(GrammarCheck(""), START_S):
                allowed = "none: the model's tokenizer cannot be used by llguidance"
                raise InvalidArgumentError("grammar", f"a grammar ({error})", allowed)
            self._settings, self.is_idle = None, True
        check.check_wanted()
        self.is_idle = False
        self._write(check.grammar)
        error, cpu_s = self._read(check, MAX_DURATION_S)
        self.is_idle = True
        return error, cpu_s

    def end(self) -> None:
        self._child.kill()
        with contextlib.suppress(OSError):
            self._child.__exit__(None, None, None)  # closes the pipes, and waits

    def _write(self, value: Any) -> None:
        assert self._child.stdin is not None
        try:
            write_line(self._child.stdin, value)
        except OSError:
            raise self._ended() from None

    def _read(self, check: GrammarCheck, timeout_s: float) -> Any:
        assert self._child.stdout is not None
        deadline, read = time.monotonic() + timeout_s, bytearray()
        with selectors.PollSelector() as selector:  # which takes no descriptor of its own
            selector.register(self._child.stdout, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                check.check_wanted()
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise ResourceExhaustedError(
                        f"the check of the grammar took more than {MAX_DURATION_S:g} s"
                    )
                if not selector.select(min(left_s, _POLL_S)):
                    continue
                piece = os.read(self._child.stdout.fileno(), 2**16)
                if not piece:
                    raise self._ended()
                read += piece
        return json.loads(read)

    def _ended(self) -> _EndedError:
        try:
            returncode = self._child.wait(1.0)  # it has closed a pipe
        except subprocess.TimeoutExpired:
            returncode = 1
        self.end()
        return _EndedError(returncode)
