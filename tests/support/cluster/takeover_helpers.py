"""Processes of a cluster that are killed during streams, and streams over HTTP that are resumed."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import httpx
import psutil

from gammaray import Client, GammarayError, RetryPolicy
from orchestrator.launcher.reaper import runs
from tests.support.cluster.cluster_helpers import Cluster, eventually

RECOVERY_S = 240.0
"""For a replica to be noticed as dead and replaced: its process alone takes ten seconds to start on a quiet
machine, and over a minute on a busy one."""

PATIENT = RetryPolicy(resume_s=RECOVERY_S)


def two_orchestrators(cluster: Cluster) -> list[psutil.Process]:
    """Wait until the cluster has recovered from the previous test, and return its two orchestrators.

    Call it before a stream begins: on a busy machine it may take longer than the stream.
    """
    found: set[int] = set()

    def have_both_settled() -> bool:
        nonlocal found
        views = []
        try:
            for _ in range(4):  # a new connection goes to the next one
                with Client(cluster.grpc) as client:
                    streamed = client.status(timeout_s=30)
                views.append({p.pid for p in streamed if p.role == "orchestrator" and p.healthy})
        except GammarayError:
            return False
        found = views[0]
        return len(found) == 2 and views.count(found) == len(views) and all(map(_is_running, found))

    assert eventually(have_both_settled, RECOVERY_S), found
    return [psutil.Process(pid) for pid in found]


def kill(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes; one may have been replaced in the meantime."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def stream_over_http(
    cluster: Cluster, path: str, body: dict[str, Any], after_event: Callable[[], object]
) -> tuple[str, list[int], int]:
    """Return text, token ids and the number of connections of a stream that is resumed until its end."""
    text, last_id, connections = "", None, 0
    token_ids: list[int] = []
    with httpx.Client(base_url=cluster.http, timeout=60) as client:
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            connections += 1
            headers = {} if last_id is None else {"Last-Event-ID": last_id}
            try:
                with client.stream("POST", path, json={"stream": True, **body}, headers=headers) as answer:
                    if answer.status_code != 200:
                        raise httpx.NetworkError(answer.read().decode())
                    for event_id, data in _events_of(answer.iter_lines()):
                        if data == "[DONE]":
                            return text, token_ids, connections
                        event = json.loads(data)
                        if "error" in event:
                            raise httpx.NetworkError(data)
                        (choice,) = event["choices"]
                        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
                        token_ids = event.get("gammaray", {}).get("token_ids", [])
                        last_id = event_id or last_id
                        after_event()
            except httpx.TransportError:
                time.sleep(0.5)
    raise AssertionError("it never ended")


def _events_of(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, line[6:]


def _is_running(pid: int) -> bool:
    try:
        return runs(psutil.Process(pid))
    except psutil.Error:
        return False
