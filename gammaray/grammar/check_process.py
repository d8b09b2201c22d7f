"""Process that checks grammars of users for `gammaray.grammar.check_pool`: `python -m` this module.

On standard input it reads frames of 4 bytes of length and UTF-8 text: first the tokenizer's settings, then
grammars. To each grammar it answers with a frame on standard output: the error, if there is one, and the CPU
time in seconds. It ends at the end of its input, which comes with the end of its parent at the latest, or by
a signal at its limits of CPU time and memory, which the system enforces while llguidance works.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import IO

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler


def read_frame(stream: IO[bytes]) -> str | None:
    """Return the next text; None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    (length,) = struct.unpack(">I", header)
    body = stream.read(length)
    return body.decode("utf-8", "surrogatepass") if len(body) == length else None


def write_frame(stream: IO[bytes], text: str) -> None:
    """Write a text, surrogates included."""
    body = text.encode("utf-8", "surrogatepass")
    stream.write(struct.pack(">I", len(body)) + body)
    stream.flush()


def _main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    first = read_frame(requests)
    if first is None:
        return
    settings = json.loads(first)
    try:
        compiler = GrammarCompiler(settings["tokenizer"], settings["vocab_size"], settings["eos_token_ids"])
    except Exception as error:  # llguidance raises different ones
        write_frame(answers, f"{type(error).__name__}: {error}")
        return
    _limit_memory(settings["max_memory_bytes"])
    write_frame(answers, "")
    while (grammar := read_frame(requests)) is not None:
        # CPU time of all threads; the signal ends the process also inside llguidance.
        signal.setitimer(signal.ITIMER_PROF, settings["max_cpu_s"])
        began = time.process_time()
        error_fields = _error_of(compiler, grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, json.dumps([error_fields, time.process_time() - began]))


def _error_of(compiler: GrammarCompiler, grammar: str) -> list[str] | None:
    try:
        compiler.check(grammar)
    except InvalidArgumentError as error:
        return [error.got, error.allowed]
    return None


def _limit_memory(max_bytes: int) -> None:
    """Bound the memory beyond what is in use; llguidance aborts the process where it gets no more."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if statm.exists():  # Linux; elsewhere the limit of CPU time bounds memory as well
        used = int(statm.read_text().split()[5]) * resource.getpagesize()
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = used + max_bytes if hard == resource.RLIM_INFINITY else min(hard, used + max_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    _main()
