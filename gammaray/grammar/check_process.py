"""Process that checks grammars of users for `gammaray.grammar.check_pool`: `python -m` this module.

On standard input it reads lines of JSON: first the tokenizer's settings, then grammars. To each grammar it
answers with a line on standard output: the error, if there is one, and the CPU time in seconds. It ends at
the end of its input, which comes with the end of its parent at the latest, or by a signal at its limits of
CPU time and memory, which the system enforces while llguidance works.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import IO, Any

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import GrammarCompiler


def write_line(stream: IO[bytes], value: Any) -> None:
    """Write a value as a line of JSON, whose texts may have surrogates."""
    stream.write(json.dumps(value).encode() + b"\n")
    stream.flush()


def _main() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else may write between the answers
    first = requests.readline()
    if not first.endswith(b"\n"):
        return
    settings = json.loads(first)
    try:
        compiler = GrammarCompiler(settings["tokenizer"], settings["vocab_size"], settings["eos_token_ids"])
    except Exception as error:  # llguidance raises different ones
        write_line(answers, f"{type(error).__name__}: {error}")
        return
    _limit_memory(settings["max_memory_bytes"])
    write_line(answers, "")
    while (line := requests.readline()).endswith(b"\n"):
        grammar = json.loads(line)
        # CPU time of all threads; the signal ends the process also inside llguidance.
        signal.setitimer(signal.ITIMER_PROF, settings["max_cpu_s"])
        began = time.process_time()
        refusal: list[str] | None = None
        try:
            compiler.check(grammar)
        except InvalidArgumentError as error:
            refusal = [error.got, error.allowed]
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_line(answers, [refusal, time.process_time() - began])


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
