"""The end of a run of tests, in one process and in two: skipped, slow and left-out tests, left threads."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import threading, time, pytest
from tests.programs import PROGRAMS

@pytest.mark.skip(reason=PROGRAMS["chromium"].missing)
def test_that_needs_a_program(): pass

def test_that_takes_long(): time.sleep(2.1)

@pytest.mark.slow
def test_marked(): pass

@pytest.mark.e2e
def test_of_a_cluster(): pass

def test_that_is_fast(): pass

def test_that_leaves_a_thread():
    threading.Thread(target=time.sleep, args=[100], name="left", daemon=True).start()

def test_whose_thread_ends():
    threading.Thread(target=time.sleep, args=[0.1]).start()

@pytest.fixture(scope="module")
def server():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="server")
    thread.start()
    yield
    stop.set()

def test_of_a_server(server): pass

def test_of_the_same_server(server): pass
"""
PLUGINS = ("tests.support.run_reports", "tests.support.threads_left")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "2"])
def test_run_of_tests_ends_with_what_concerns_the_developer(tmp_path, processes):
    file = tmp_path / "test_generated.py"
    file.write_text(TESTS)
    options = [f"--rootdir={tmp_path}", f"--config-file={ROOT / 'pyproject.toml'}", "-n", processes]
    plugins = [option for name in PLUGINS for option in ("-p", name)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *plugins, "-m", "not slow and not e2e", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    lines = done.stdout.splitlines()

    def following(title, count):
        (start,) = [number for number, line in enumerate(lines) if title in line and line.startswith("=")]
        return [line.strip() for line in lines[start + 1 : start + 1 + count]]

    reason, _, command = following("skipped tests, and how to enable them", 3)
    assert reason.startswith("1 skipped: chromium is not installed")
    assert command == "to enable: make test-programs"
    slow = following("unmarked tests that took over 2 s", 2)
    assert [line.rpartition("::")[2] for line in slow] == [
        "test_that_leaves_a_thread",
        "test_that_takes_long",
    ]
    assert following("left out", 1) == [
        "1 tests marked slow and 1 tests marked e2e; to run them, too: make test-all"
    ]
    assert "threads that outlive their tests: left, begun in" in done.stdout
    assert "6 passed, 1 skipped" in lines[-1]
    assert "1 error" in lines[-1]
