"""A whole cluster started as users do: in its own process, with the addresses that it prints."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import openai
import psutil

from gammaray import Client, Completion, GammarayError, ProcessStatus
from gammaray.v1 import draft_service_pb2, draft_service_pb2_grpc, target_service_pb2, target_service_pb2_grpc
from orchestrator.launcher.preflight import free_ports
from orchestrator.launcher.reaper import runs

T = TypeVar("T")
ROOT = Path(__file__).parents[3]

LAUNCHER = (sys.executable, "-m", "orchestrator.launcher.cluster")
TEST_MARK = "MARK_OF_A_TEST"
CACHE_BUDGET_MB = "256"
"""Of each worker: caches of ended sessions fill it, in some hundred sessions of the demo pair."""
START_TIMEOUT_S = 330.0  # the launcher itself gives up after 300 s, and says why
STOP_TIMEOUT_S = 120.0
PATIENCE_S = 60.0
"""For what takes a moment on a quiet machine: a shared one may stand still for many seconds."""

DRAFT_PATIENCE_S = 120.0
"""A drafter that was late again and again pauses for half a minute."""
READY = re.compile(r"ready http=(http://127\.0\.0\.1:\d+) grpc=(127\.0\.0\.1:\d+)\n")


@dataclass
class Cluster:
    http: str  # base URL of the HTTP API, without /v1
    grpc: str  # host:port of the gRPC API
    launcher: subprocess.Popen[str]  # the process that started it
    output: list[str] = field(default_factory=list)  # standard output of the launcher

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=60)

    def status(self) -> list[ProcessStatus]:
        with Client(self.grpc) as client:
            return client.status(timeout_s=PATIENCE_S)

    def sessions(self) -> dict[str, int]:
        """Return the number of sessions of each role; the workers report their current ones."""
        held = dict.fromkeys(("orchestrator", "draft", "target"), 0)
        for process in self.status():
            if process.role in held:
                held[process.role] += asked(process).sessions
        return held

    def wait_until_idle(self) -> None:
        """Wait until no orchestrator and no worker holds a session."""

        def is_idle() -> bool:
            nonlocal held
            try:
                held = self.sessions()
            except (GammarayError, grpc.RpcError) as error:  # who was killed may still be listed
                held = error
            return isinstance(held, dict) and not any(held.values())

        held: object = None
        assert eventually(is_idle), held

    def processes(self) -> list[psutil.Process]:
        """Return all descendants of the launcher; any may end at any time."""
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def commands(self) -> list[tuple[psutil.Process, list[str]]]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append((process, process.cmdline()))
        return [(process, command) for process, command in found if command]

    def check_stop(self, number: int) -> None:
        """Stop the cluster: the exit status is 0, no process is left, only the ready line was printed."""
        below = self.processes()
        self.launcher.send_signal(number)
        assert self.launcher.wait(STOP_TIMEOUT_S) == 0
        assert wait_until_gone(below, 1) == []
        assert len(self.output) == 1


@contextmanager
def running_cluster(*options: str, **how: Any) -> Iterator[Cluster]:
    """Start a cluster on free ports, as `launch` does, and stop it at the end."""
    http_port, grpc_port = free_ports("127.0.0.1", 2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    launcher = launch("--wait-ready", "--die-with-parent", *ports, *options, **how)
    try:
        cluster = _wait_ready(launcher)
        assert (cluster.http, cluster.grpc) == (f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}")
        yield cluster
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(STOP_TIMEOUT_S)
            finally:
                launcher.kill()


def launch(
    *options: str, mark: str = "", stderr: int | None = None, command: Sequence[str] = LAUNCHER
) -> subprocess.Popen[str]:
    """Start the launcher; its processes inherit `mark`, by which `started_with` finds them."""
    environment = {"GAMMARAY_CACHE_BUDGET_MB": CACHE_BUDGET_MB, **os.environ, TEST_MARK: mark}
    given = [*command, *options]
    return subprocess.Popen(given, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


class Program:
    """A program beside this file that answers in lines; see `program`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def answer(self, timeout_s: float) -> str:
        """Return its next line, which it writes at once; empty if it has ended."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert is_there, f"no answer within {timeout_s:g} s"
        return self._process.stdout.readline().decode().strip()

    def ask(self, line: str, timeout_s: float) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return self.answer(timeout_s)


@contextmanager
def program(name: str, *arguments: str, stderr: Any = None) -> Iterator[Program]:
    """Run a program of tests/support/cluster in a process of its own; it ends with its standard input."""
    command = [sys.executable, "-m", f"{__package__}.{name}", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=stderr, bufsize=0)
    try:
        yield Program(process)
        process.communicate(timeout=STOP_TIMEOUT_S)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def started_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TEST_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def asked(process: ProcessStatus) -> ProcessStatus:
    if process.role not in ("draft", "target"):
        return process
    info = info_of(process)
    held = {"sessions": info.num_sessions, "num_queued": info.num_queued, "cache_bytes": info.cache_bytes}
    return replace(process, **held)


def info_of(worker: ProcessStatus) -> Any:
    with grpc.insecure_channel(worker.address) as channel:
        if worker.role == "draft":
            draft = draft_service_pb2_grpc.DraftServiceStub(channel)
            return draft.GetDraftInfo(draft_service_pb2.GetDraftInfoRequest(), timeout=30)
        target = target_service_pb2_grpc.TargetServiceStub(channel)
        return target.GetTargetInfo(target_service_pb2.GetTargetInfoRequest(), timeout=30)


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return the processes that still run after a while."""
    eventually(lambda: not any(map(runs, processes)), timeout_s)
    return list(filter(runs, processes))


def eventually(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def undisturbed(ask: Callable[[], T], is_disturbed: Callable[[T], object]) -> T:
    """Return the first response that is not disturbed by a draft worker that is late: it is paused then."""
    deadline = time.monotonic() + DRAFT_PATIENCE_S
    while is_disturbed(answer := ask()):
        assert time.monotonic() < deadline, f"the drafter was late for {DRAFT_PATIENCE_S:g} s"
        time.sleep(0.2)
    return answer


def is_without_model(completion: Completion) -> bool:
    return completion.summary.model_cycles == 0


def _wait_ready(launcher: subprocess.Popen[str]) -> Cluster:
    """Read the output of the launcher up to the ready line; a thread collects the rest."""
    timer = threading.Timer(START_TIMEOUT_S, launcher.kill)
    timer.start()
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    timer.cancel()
    match = READY.fullmatch(line)
    status = launcher.poll() if line else launcher.wait(STOP_TIMEOUT_S)
    assert match is not None, f"printed {line!r}, exit status {status}"
    cluster = Cluster(match[1], match[2], launcher, [line])
    threading.Thread(target=cluster.output.extend, args=(launcher.stdout,), daemon=True).start()
    return cluster
