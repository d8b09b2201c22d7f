"""The cluster and the baselines as processes: failures are reported, no process is left."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest

from benchmarks import cluster
from benchmarks.cluster import ClusterError, run_or_exit, running_cluster
from gammaray.errors import UnavailableError


async def test_running_cluster_bad_option_raises_the_message_of_the_command() -> None:
    with pytest.raises(ClusterError, match=r"ended with code 2(.|\n)*No such option") as caught:
        async with running_cluster("--no-such-option"):
            pytest.fail("started")
    assert "Traceback" not in str(caught.value)


async def test_stop_kills_and_names_processes_that_survive_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "GONE_TIMEOUT_S", 0.2)
    # A parent that ends at SIGINT and a child that does not care.
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True)"
    parent = f"""if True:
        import signal, subprocess, sys
        signal.signal(signal.SIGINT, lambda *_: sys.exit())
        child = {stubborn!r} + "; time.sleep(60)"
        subprocess.Popen([sys.executable, "-c", child], start_new_session=True).wait()
        """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 100)
    (grandchild,) = psutil.Process(process.pid).children()
    with pytest.raises(ClusterError, match=f"not ended(.|\n)*{grandchild.pid}"):
        await cluster.stop(process)
    assert process.returncode == 0
    assert not cluster.is_alive(grandchild) or not psutil.wait_procs([grandchild], timeout=30)[1]


def test_free_ports_are_different_and_nobody_listens() -> None:
    ports = cluster.free_ports(5)
    assert len(set(ports)) == 5
    assert all(10_000 <= port <= 29_000 for port in ports)


def test_run_or_exit_failure_prints_it_and_exits_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        raise UnavailableError("no target worker")

    with pytest.raises(SystemExit) as caught:
        run_or_exit(work())
    assert caught.value.code == 1
    assert capsys.readouterr().err == "failed: no target worker\n"


def test_run_or_exit_returns_the_result() -> None:
    async def work() -> int:
        return 7

    assert run_or_exit(work()) == 7
