"""The cluster and the baselines as processes: failures are reported, no process is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import cluster
from benchmarks.cluster import ClusterError, running_cluster
from orchestrator.launcher.reaper import runs

ROOT = Path(__file__).parents[3]


async def test_running_cluster_bad_option_raises_the_message_of_the_command() -> None:
    with pytest.raises(ClusterError, match=r"ended with code 2(.|\n)*No such option") as caught:
        async with running_cluster("--no-such-option"):
            pytest.fail("started")
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
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
    assert not runs(grandchild) or not psutil.wait_procs([grandchild], timeout=30)[1]


BENCHMARK = """
import asyncio, sys
from benchmarks.cluster import run_or_exit, running_cluster

async def work():
    async with running_cluster() as cluster:
        print(cluster.grpc_address, flush=True)
        await asyncio.Event().wait()

sys.executable = sys.argv[1]
run_or_exit(work())
"""
LAUNCHER = f"""#!{sys.executable}
import signal, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGINT, lambda *_: sys.exit(child.kill()))
print("ready http=http://127.0.0.1:1 grpc=127.0.0.1:2", flush=True)
child.wait()
"""
"""Becomes ready, has a child, ends both at SIGINT, as `gammaray up`."""


@pytest.mark.slow
def test_sigterm_to_a_running_benchmark_ends_its_cluster(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    with subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, launcher], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "127.0.0.1:2\n"
        below = psutil.Process(benchmark.pid).children(recursive=True)
        assert len(below) == 2
        assert os.getsid(below[0].pid) != os.getsid(benchmark.pid), "the terminal's Ctrl-C would reach both"
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(100) == 143
    assert not any(runs(process) for process in below)
