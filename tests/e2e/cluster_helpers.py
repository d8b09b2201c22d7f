"""A whole cluster as users start it: in its own process, found through what it prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import openai
import psutil

from gammaray import Client, ProcessStatus
from gammaray.v1 import (
    draft_service_pb2,
    draft_service_pb2_grpc,
    target_service_pb2,
    target_service_pb2_grpc,
)
from orchestrator.preflight import free_ports

TEST_MARK = "GAMMARAY_TEST_MARK"
START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
READY = re.compile(r"ready http=(http://127\.0\.0\.1:\d+) grpc=(127\.0\.0\.1:\d+)\n")


@dataclass
class Cluster:
    """A running cluster.

    Args:
        http: Base URL of the HTTP API, without /v1.
        grpc: host:port of the gRPC API.
        launcher: The process that started it.
        output: What the launcher has printed on standard output.
    """

    http: str
    grpc: str
    launcher: subprocess.Popen[str]
    output: list[str] = field(default_factory=list)

    def openai(self) -> openai.OpenAI:
        """Return the official client; failures are not retried, so that tests see them."""
        return openai.OpenAI(base_url=f"{self.http}/v1", api_key="none", max_retries=0, timeout=60)

    def status(self) -> list[ProcessStatus]:
        with Client(self.grpc) as client:
            return client.status()

    def sessions(self) -> dict[str, int]:
        """Return how many sessions each role holds; the workers are asked themselves, for it now."""
        held = dict.fromkeys(("orchestrator", "draft", "target"), 0)
        for process in self.status():
            if process.role in held:
                held[process.role] += asked(process).sessions
        return held

    def wait_until_idle(self, timeout_s: float = 15.0) -> None:
        """Wait until no orchestrator and no worker holds a session."""
        deadline = time.monotonic() + timeout_s
        while any((held := self.sessions()).values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(held.values()), held

    def processes(self) -> list[psutil.Process]:
        """Return everything below the launcher."""
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the launcher and return its exit status."""
        self.launcher.send_signal(number)
        return self.launcher.wait(STOP_TIMEOUT_S)


@contextmanager
def running_cluster(*options: str, stderr: int | None = None) -> Iterator[Cluster]:
    """Start a cluster on free ports and stop it in the end; its own complaints go to `stderr`."""
    http_port, grpc_port = free_ports("127.0.0.1", 2)
    ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    launcher = launch("--wait-ready", "--die-with-parent", *ports, *options, stderr=stderr)
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


def launch(*options: str, mark: str = "", stderr: int | None = None) -> subprocess.Popen[str]:
    """Start the launcher; `mark` is handed down to all that it starts, for `started_with` to find."""
    command = [sys.executable, "-m", "orchestrator.cluster", *options]
    environment = {**os.environ, TEST_MARK: mark}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)


def started_with(mark: str) -> list[str]:
    """Return the command lines of what a launcher with this mark started, however far below it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TEST_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return found


def asked(process: ProcessStatus) -> ProcessStatus:
    """Return a process's status with what a worker itself says of its sessions, for it now."""
    if process.role not in ("draft", "target"):
        return process
    with grpc.insecure_channel(process.address) as channel:
        if process.role == "draft":
            draft = draft_service_pb2_grpc.DraftServiceStub(channel)
            info = draft.GetDraftInfo(draft_service_pb2.GetDraftInfoRequest(), timeout=10)
        else:
            target = target_service_pb2_grpc.TargetServiceStub(channel)
            info = target.GetTargetInfo(target_service_pb2.GetTargetInfoRequest(), timeout=10)
    return replace(
        process, sessions=info.num_sessions, num_queued=info.num_queued, cache_bytes=info.cache_bytes
    )


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return those that still run."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_until_gone(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until none of them runs; return those that do after all."""
    deadline = time.monotonic() + timeout_s
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _wait_ready(launcher: subprocess.Popen[str]) -> Cluster:
    """Read what the launcher prints until it is the ready line; what follows is collected beside it."""
    timer = threading.Timer(START_TIMEOUT_S, launcher.kill)
    timer.start()
    assert launcher.stdout is not None
    line = launcher.stdout.readline()
    timer.cancel()
    match = READY.fullmatch(line)
    assert match is not None, f"printed {line!r}, exit status {launcher.poll()}"
    cluster = Cluster(match[1], match[2], launcher, [line])
    threading.Thread(target=cluster.output.extend, args=(launcher.stdout,), daemon=True).start()
    return cluster
