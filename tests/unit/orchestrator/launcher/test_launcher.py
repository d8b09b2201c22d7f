"""The launcher: its checks, the signals that stop it, and the cleanup of its processes."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from gammaray.config import ClusterSettings
from gammaray.errors import InvalidArgumentError, UnavailableError
from orchestrator.launcher import cluster
from orchestrator.launcher.cluster import private_directory, serve_environment, serve_errors
from orchestrator.launcher.preflight import check_models, check_port, gpu_share, vocab_size, worker_gpus
from orchestrator.launcher.reaper import MARK, children_named, end_marked, marked, runs
from orchestrator.launcher.signals import StopSignals


def model(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_port_that_is_taken_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"grpc_port: got {port}"):
            check_port("grpc_port", "127.0.0.1", port)
    check_port("grpc_port", "127.0.0.1", port)


def test_vocabularies_that_differ_are_noted_with_both_sizes(tmp_path):
    target, draft = model(tmp_path / "t", vocab_size=2048), model(tmp_path / "d", vocab_size=500)
    assert check_models(target, target) == []
    (note,) = check_models(target, draft)
    assert "500 token ids and the target 2048" in note


def test_vocabulary_of_a_multimodal_model_is_that_of_its_text(tmp_path):
    assert vocab_size("target", model(tmp_path / "m", text_config={"vocab_size": 7})) == 7


@pytest.mark.parametrize("name", ["missing", "empty", "broken", "other"])
def test_invalid_model_is_rejected(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    model(tmp_path / "other", architectures=["Something"])
    with pytest.raises(InvalidArgumentError, match="target: got"):
        vocab_size("target", str(tmp_path / name))


@pytest.mark.parametrize(
    ("num_gpus", "num_workers", "share"),
    [(0, 3, 0), (1, 1, 1), (2, 2, 1), (8, 2, 1), (1, 2, 0.5), (1, 3, 0.3333), (2, 3, 0.5), (2, 5, 0.3333)],
)
def test_gpu_shares_fit_all_workers(num_gpus, num_workers, share):
    assert gpu_share(num_gpus, num_workers) == share
    if share:
        assert num_gpus * int(1 / share) >= num_workers


def test_spread_targets_get_whole_gpus_and_drafters_share_the_rest():
    def gpus(num_gpus, targets, drafts, ranks):
        workers = {"target_workers": str(targets), "draft_workers": str(drafts)}
        return worker_gpus(ClusterSettings(**workers, tensor_parallel=ranks), num_gpus)

    assert gpus(4, 1, 2, 1) == {"target": 1.0, "draft": 1.0}
    assert gpus(0, 1, 1, 2) == {"target": 0.0, "draft": 0.0}
    assert gpus(5, 2, 3, 2) == {"target": 2, "draft": 0.3333}
    assert gpus(4, 2, 0, 2)["target"] == 2
    with pytest.raises(InvalidArgumentError, match="within 4 GPUs"):
        gpus(4, 2, 1, 2)


FREE_PORTS = """
from orchestrator.launcher.preflight import free_ports
print(free_ports("127.0.0.1", 800), flush=True)
input()
"""


def test_free_ports_of_two_processes_differ():
    """Two clusters start at once; the ports of the first are chosen, but nothing listens on them yet."""
    command = [sys.executable, "-c", FREE_PORTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        held = set(json.loads(first.stdout.readline()))
        second = subprocess.run(command, input="\n", capture_output=True, text=True, check=True)
        first.communicate("\n")
    assert len(held) == 800
    assert not held & set(json.loads(second.stdout))


def test_environments_of_two_clusters_share_only_settings():
    directories = [private_directory(), private_directory()]
    try:
        first, second = (serve_environment(directory, "127.0.0.1") for directory in directories)
    finally:
        for directory in directories:
            shutil.rmtree(directory)
    distinct = [name for name in first if name.endswith(("_LOC", "_PATH", "_FILE", "_BASE", "_TOKEN"))]
    assert len(distinct) >= 6
    assert all(first[name] != second[name] for name in distinct)


@pytest.mark.parametrize("length", [9, 10])
def test_directory_of_a_cluster_leaves_room_for_the_paths_of_sockets(length, monkeypatch):
    parent = Path(f"/tmp/{secrets.token_hex(4)}"[:length])
    parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    directory = private_directory()
    directory.rmdir()
    parent.rmdir()
    assert (directory.parent == parent) == (length == 9)
    assert len(str(directory / "h" / ("0" * 56) / "admin.sock")) <= 97


ORPHAN = """
import os, subprocess, sys
# A grandchild that ignores SIGTERM, whose parent is gone by the time it is looked for.
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(250)"
)
subprocess.Popen([sys.executable, "-c", stubborn])
"""


def test_end_marked_finds_orphans_that_ignore_sigterm():
    cluster_id = uuid.uuid4().hex
    command, environment = [sys.executable, "-c", ORPHAN], {**os.environ, MARK: cluster_id}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.wait(60)
        assert len(marked(cluster_id)) == 1
        assert end_marked(cluster_id, grace_s=0.2) == 1
    assert marked(cluster_id) == []
    assert end_marked(cluster_id) == 0


IDLE = """
import os, pathlib, signal, sys
def end(*_):
    pathlib.Path(sys.argv[1]).write_text(str(os.sched_getscheduler(0)))
    sys.exit()
signal.signal(signal.SIGTERM, end)
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print("up", flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may take a process out of idle priority")
def test_end_marked_lets_a_process_at_idle_priority_end_on_a_busy_machine(tmp_path):
    cluster_id, found = uuid.uuid4().hex, tmp_path / "policy"
    command, environment = [sys.executable, "-c", IDLE, str(found)], {**os.environ, MARK: cluster_id}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as idle:
        assert idle.stdout.readline() == "up\n"
        assert end_marked(cluster_id, grace_s=60) == 1
    assert found.read_text() == str(os.SCHED_OTHER)


UNMARKED_CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={}).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_end_marked_finds_a_child_that_lost_the_mark():
    cluster_id = uuid.uuid4().hex
    command, environment = [sys.executable, "-c", UNMARKED_CHILD], {**os.environ, MARK: cluster_id}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        assert {process.pid for process in marked(cluster_id)} == {parent.pid, child.pid}
        assert end_marked(cluster_id) == 2
    assert not runs(child)


class Vanished:
    """A process that was listed, and has ended by the time anything is asked of it."""

    pid = 2**22

    def __getattr__(self, name):
        raise psutil.NoSuchProcess(self.pid)


def test_children_named_leaves_out_one_that_ends_while_it_is_looked_at(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        name = psutil.Process(child.pid).name()
        real = psutil.Process.children
        monkeypatch.setattr(psutil.Process, "children", lambda self: [Vanished(), *real(self)])
        assert child.pid in {process.pid for process in children_named([name])}
        child.communicate()
    assert child.pid not in {process.pid for process in children_named([name])}


@pytest.mark.parametrize(
    ("num_failures", "left_s", "num_tries"),
    [
        pytest.param(0, 60, 1, id="at-once"),
        pytest.param(3, 60, 4, id="late-three-times"),
        pytest.param(9, 60, None, id="never"),
        pytest.param(1, -1, None, id="no-time-left"),
    ],
)
def test_ray_that_gives_up_is_started_again(monkeypatch, tmp_path, num_failures, left_s, num_tries):
    failures = [RuntimeError("the current node timed out during startup")] * num_failures
    ray, ended = Mock(**{"init.side_effect": [*failures, None]}), []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "end_marked", ended.append)
    start = partial(cluster.start_ray, tmp_path, ExitStack(), StopSignals(), time.monotonic() + left_s)
    if num_tries is None:
        with pytest.raises(UnavailableError, match="timed out"):
            start()
    else:
        start()
        assert ray.init.call_count == num_tries
    assert ended == [tmp_path.name] * min(ray.init.call_count, num_failures)


def test_last_errors_of_serve_are_found(tmp_path):
    assert serve_errors(tmp_path) == []
    logs = tmp_path / "ray" / "session_latest" / "logs" / "serve"
    logs.mkdir(parents=True)
    (logs / "proxy.log").write_text(
        "ERROR 2026-11-25 09:00:03,000 proxy -- reload failed\n"
        "WARNING 2026-11-25 09:00:09,000 proxy -- slow\nERROR in a traceback\n"
    )
    (logs / "controller.log").write_text(
        "".join(f"ERROR 2026-11-25 09:00:0{second},000 controller -- {second}\n" for second in (1, 2, 4))
    )
    assert serve_errors(tmp_path) == [
        "controller.log: controller -- 2",
        "proxy.log: proxy -- reload failed",
        "controller.log: controller -- 4",
    ]


SCRIPT = """
import os, signal, sys
from orchestrator.launcher.signals import Stop, StopSignals
signals = StopSignals()
signals.take()
"""


def run(body):
    """Run a script that has taken the signals, in a process of its own."""
    return subprocess.run([sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_stops_once_and_nothing_is_printed_afterwards(name):
    done = run(f"""
try:
    os.kill(os.getpid(), signal.{name})
except Stop:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print("noise")
    print("noise", file=sys.stderr)
    os.system("echo noise; echo noise >&2")
    sys.exit(7 if signals.came else 8)
""")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


STOPPED = {
    "a stop that a library swallows is raised by the next check": """
try:
    os.kill(os.getpid(), signal.SIGTERM)
except BaseException:
    pass
try:
    signals.check()
except Stop:
    sys.exit(7)
""",
    "handlers are kept while a library sets its own": """
with signals.kept():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
    signal.signal(signal.SIGUSR1, lambda number, frame: None)
os.kill(os.getpid(), signal.SIGUSR1)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except Stop:
    sys.exit(7)
""",
    "a held signal is delivered afterwards": """
try:
    with signals.held():
        os.kill(os.getpid(), signal.SIGTERM)
        assert not signals.came
        held = True
except Stop:
    sys.exit(7 if held else 8)
""",
}


@pytest.mark.parametrize("body", STOPPED.values(), ids=STOPPED)
def test_signal_is_never_lost(body):
    assert run(body).returncode == 7
