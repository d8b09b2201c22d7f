"""A run of tests reports the test that leaves a thread."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import threading, time, pytest

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


@pytest.mark.slow
def test_thread_that_outlives_its_test_fails_it(tmp_path):
    file = tmp_path / "test_generated.py"
    file.write_text(TESTS)
    options = [f"--rootdir={tmp_path}", f"--config-file={ROOT / 'pyproject.toml'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "tests.support.threads_left", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "threads that outlive their tests: left, begun in" in done.stdout
    assert "4 passed, 1 error" in done.stdout.splitlines()[-1]
