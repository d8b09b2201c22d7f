"""The reference: a second server or a model directory, and the comparison of log-probabilities with it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from gammaray.audit.answers import Choice, Token
from gammaray.audit.chance import SPECIAL
from gammaray.audit.subject import Subject
from gammaray.audit.verdicts import CheckResult, Status, inconclusive, not_possible
from gammaray.errors import FailedPreconditionError, UnavailableError

MAX_MEAN = 0.02
"""Largest mean difference of log-probabilities that passes: above bfloat16's, below a quantised target's."""

MIN_TOKENS = 200
"""Tokens that must have been compared."""

_LIKELY = -4.6
_HOST = "127.0.0.1"
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 45.0
_READY = re.compile(rb"ready http=(\S+)")
_NEEDED = ("services", "orchestrator", "torch", "transformers", "ray", "redis")


async def check_probabilities(subject: Subject) -> CheckResult:
    """Reported log-probabilities equal those of one forward pass over the whole text.

    The pass is the reference's, else the server's own: completions with `echo`.
    """
    subject.need_logprobs(2)
    server = subject.server
    other = server if subject.is_own_reference else subject.reference or server
    if other.is_chat or server.is_chat:
        raise not_possible("log-probabilities of a given text need /v1/completions with `echo`")
    whose = "the server's own" if other.url == server.url else "the reference's"
    differences: list[float] = []
    signed: list[float] = []
    unaligned, largest, evidence = 0, 0.0, {}
    for i, prompt in enumerate(subject.prompts[:24]):
        if len(differences) >= MIN_TOKENS:
            break
        asked = {"temperature": 1, "max_tokens": 64, "seed": subject.seed + i}
        ours = (await server.ask(prompt, **asked)).choices[0]
        tokens = [token for token in ours.tokens if token.key not in SPECIAL]
        echo = {
            "temperature": 0,
            "max_tokens": 1,
            "echo": True,
            "top_p": None,
            "return_tokens_as_token_ids": None,
        }
        echoed = (await other.ask(prompt + ours.text, **echo)).choices[0]
        if not echoed.text.startswith(prompt):
            raise not_possible("the server ignores `echo`")
        theirs = _given(echoed, len(tokens))
        if not tokens or [token.text for token in theirs] != [token.text for token in tokens]:
            unaligned += 1  # the text has other tokens than those that were generated
            continue
        for at, (token, given) in enumerate(zip(tokens, theirs, strict=True)):
            if token.lp is None or given.lp is None or given.lp < _LIKELY:
                continue
            difference = token.lp - given.lp
            signed.append(difference)
            differences.append(abs(difference))
            if differences[-1] > largest:
                largest, evidence = differences[-1], {
                    "prompt": i, "index": at, "token": token.text, "server": token.lp, "reference": given.lp,
                    "curl": other.curl(prompt + ours.text, **echo),
                }  # fmt: skip
    if unaligned and not differences:
        raise not_possible("`echo` lists no tokens of the text, or other ones than were generated")
    if len(differences) < MIN_TOKENS:
        raise inconclusive(f"only {len(differences)} tokens could be compared")
    mean = sum(differences) / len(differences)
    evidence |= {
        "tokens": len(differences),
        "mean": mean,
        "largest": largest,
        "signed": sum(signed) / len(signed),
    }
    summary = (
        f"{len(differences)} tokens: log-probabilities differ from {whose} by {mean:.2g} on average, "
        f"{largest:.2g} at most"
    )
    status = Status.PASSED if mean <= MAX_MEAN else Status.FAILED
    return CheckResult(
        status, summary, evidence, server.curl(prompt, **asked) if status is Status.FAILED else ""
    )


def _given(choice: Choice, count: int) -> list[Token]:
    """Return the last `count` tokens of an echoed text; the one after them was generated."""
    end = len(choice.tokens) - 1
    return list(choice.tokens[max(0, end - count) : end]) if count else []


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[str]:
    """Serve a model directory by `gammaray up` on free loopback ports, without drafts, and yield its URL.

    Raises:
        FailedPreconditionError: The packages of a cluster are not installed.
        UnavailableError: It did not become ready within five minutes.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise FailedPreconditionError(
            f"--reference with a directory needs packages that are not installed ({', '.join(missing)}): "
            "pip install 'gammaray[all]'"
        )
    ports = [option for name in ("--http-port", "--grpc-port") for option in (name, str(_free_port()))]
    with tempfile.TemporaryFile("w+") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gammaray", "up", "--target", str(directory), *ports),
            *("--wait-ready", "--die-with-parent", "--start-timeout-s", str(_START_TIMEOUT_S)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C of a terminal reaches this process alone
        )
        try:
            yield await asyncio.wait_for(_ready(process), _START_TIMEOUT_S + _STOP_TIMEOUT_S)
        except (asyncio.TimeoutError, EOFError):
            errors.seek(0)
            last = " ".join(errors.read().split())[-500:]
            raise UnavailableError(f"gammaray up --target {directory} did not start: {last}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except asyncio.TimeoutError:
                process.kill()


async def _ready(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if found := _READY.search(line):
            return found[1].decode()
    raise EOFError


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
