"""The launcher's checks before anything starts, its options, and that nothing it started is left."""

import json
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from gammaray.errors import InvalidArgumentError
from orchestrator.cluster_env import private_directory, serve_environment
from orchestrator.cluster_options import parse_options
from orchestrator.preflight import check_port, check_vocabularies, free_ports, vocab_size


def model(folder, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_options_left_out_take_the_defaults(monkeypatch):
    monkeypatch.delenv("GAMMARAY_HTTP_PORT", raising=False)
    options = parse_options([])
    assert options.cluster.target == "demo"
    assert options.cluster.http_port == 8000
    assert not options.wait_ready


def test_options_given_are_taken(monkeypatch):
    monkeypatch.setenv("GAMMARAY_GRPC_PORT", "9100")
    line = "--target a --draft b --draft-workers 2 --target-workers 3 --orchestrators 4 --http-port 81"
    options = parse_options(
        [*line.split(), "--redis-url", "redis://h:1/0", "--deterministic", "--wait-ready"]
    )
    cluster = options.cluster
    assert (cluster.target, cluster.draft) == ("a", "b")
    assert (cluster.draft_workers, cluster.target_workers, cluster.orchestrators) == (2, 3, 4)
    assert (cluster.http_port, cluster.grpc_port, cluster.redis_url) == (81, 9100, "redis://h:1/0")
    assert cluster.deterministic
    assert options.wait_ready


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("--http-port 0", "http_port"),
        ("--http-port x", "http_port"),
        ("--draft-workers -1", "draft_workers"),
        ("--device tpu", "device"),
        ("--target=", "target"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(line, field):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_options(line.split())
    assert caught.value.field == field


def test_port_that_is_taken_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidArgumentError, match=f"grpc_port: got {port}"):
            check_port("grpc_port", "127.0.0.1", port)
    check_port("grpc_port", "127.0.0.1", port)


def test_vocabularies_that_differ_are_refused_with_both_sizes(tmp_path):
    target, draft = model(tmp_path / "t", vocab_size=2048), model(tmp_path / "d", vocab_size=500)
    check_vocabularies(target, target)
    with pytest.raises(InvalidArgumentError, match=r"500 tokens.*2048 tokens") as caught:
        check_vocabularies(target, draft)
    assert caught.value.field == "draft"


def test_vocabulary_of_a_multimodal_model_is_that_of_its_text(tmp_path):
    assert vocab_size("target", model(tmp_path / "m", text_config={"vocab_size": 7})) == 7


def test_vocabularies_of_the_demo_pair_agree():
    check_vocabularies("demo", "demo")


@pytest.mark.parametrize("name", ["missing", "empty", "broken", "other"])
def test_model_that_is_none_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    model(tmp_path / "other", architectures=["Something"])
    with pytest.raises(InvalidArgumentError, match="target: got"):
        vocab_size("target", str(tmp_path / name))


def test_free_ports_are_distinct_and_free():
    ports = free_ports("127.0.0.1", 5)
    assert len(set(ports)) == 5
    for port in ports:
        check_port("port", "127.0.0.1", port)


def test_environments_of_two_clusters_share_nothing_but_settings():
    directories = [private_directory(), private_directory()]
    try:
        first, second = (serve_environment(directory, "127.0.0.1") for directory in directories)
    finally:
        for directory in directories:
            for path in directory.iterdir():
                path.unlink()
            directory.rmdir()
    distinct = [name for name in first if name.endswith(("_LOC", "_PATH", "_FILE", "_BASE", "_TOKEN"))]
    assert len(distinct) >= 6
    assert all(first[name] != second[name] for name in distinct)
    longest = directories[0] / "h" / ("0" * 56) / "admin.sock"
    assert len(str(longest)) <= 97


ORPHANS = """
import subprocess, sys, time
from orchestrator.reaper import adopt_orphans, end_descendants
adopt_orphans()
# A child that ignores SIGTERM, whose parent is gone by the time it is looked for.
stubborn = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(60)"
)
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=1)"
child = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
assert child.stdout.readline() == "up\\n"
child.wait(10)
print(end_descendants(grace_s=0.5))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")
def test_end_descendants_finds_orphans_that_ignore_sigterm():
    before = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=30, env={**os.environ}
    )
    assert done.stdout == "1\n", done.stderr
    assert time.monotonic() - before < 20
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if "SIG_IGN);print('up'" in str(p.info["cmdline"])
    ]


def test_end_descendants_without_any_does_nothing():
    done = subprocess.run(
        [sys.executable, "-c", "from orchestrator.reaper import end_descendants as e; print(e())"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "0\n"
