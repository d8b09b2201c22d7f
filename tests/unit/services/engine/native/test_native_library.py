"""The kernel is compiled on first use: once, into a cache, or with the reason why not."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.engine.native.build import BASELINE, compile_library, find_compiler, find_library
from services.engine.native.library import open_kernel

CALLS = "calls.txt"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The library that the compiler of this machine makes, once for all tests."""
    compiler = find_compiler()
    assert compiler is not None, "these tests need a C compiler"
    return compile_library(tmp_path_factory.mktemp("compiled"), BASELINE, compiler)


@pytest.fixture
def counted_compiler(compiled, tmp_path, monkeypatch):
    """A compiler that notes each use but questions for its version, and copies what was compiled before.

    It takes a moment, in which others that do not wait for it would compile, too.
    """
    calls, script = tmp_path / CALLS, tmp_path / "counted-cc"
    calls.touch()
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] && echo counted 1.0 && exit
echo "$@" >> {calls}
sleep 0.3
while [ "$1" != -o ]; do shift; done
exec cp {compiled} "$2"
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    return calls


def num_compiled(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def test_kernel_is_compiled_once_and_then_loaded_from_the_cache(counted_compiler, tmp_path, caplog):
    cache = tmp_path / "cache"
    with caplog.at_level(logging.INFO):
        first = open_kernel(BASELINE, str(cache))
    assert first.library is not None
    assert (first.variant, first.reason) == (BASELINE, "")
    assert "compiling the CPU kernel for baseline" in caplog.text
    caplog.clear()
    assert open_kernel(BASELINE, str(cache)).library is not None
    assert num_compiled(counted_compiler) == 1
    assert "compiling" not in caplog.text
    left = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert len(left) == 1  # and nothing half made


def test_kernel_is_compiled_once_for_those_that_start_together(counted_compiler, tmp_path):
    """Threads here: the lock is that of an open file, which each thread and each process has for itself."""
    cache, start = str(tmp_path / "cache"), threading.Barrier(3)

    def open_one(_: int) -> bool:
        start.wait(60)
        return open_kernel(BASELINE, cache).library is not None

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(open_one, range(3))) == [True] * 3
    assert num_compiled(counted_compiler) == 1


def test_kernel_of_another_compiler_is_compiled_again(counted_compiler, tmp_path, monkeypatch):
    compiler = find_compiler()
    assert compiler is not None
    compile_library(tmp_path / "cache", BASELINE, compiler)
    monkeypatch.setenv("CC", f"{compiler.command[0]} -O3")
    other = find_compiler()
    assert other is not None
    assert find_library(tmp_path / "cache", BASELINE, compiler) is not None
    assert find_library(tmp_path / "cache", BASELINE, other) is None


def test_kernel_of_the_cache_needs_no_compiler_and_another_one_is_none_with_the_reason(
    counted_compiler, tmp_path, monkeypatch
):
    assert open_kernel(BASELINE, str(tmp_path / "cache")).library is not None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert open_kernel(BASELINE, str(tmp_path / "cache")).library is not None
    kernel = open_kernel(BASELINE, str(tmp_path / "another"))
    assert (kernel.library, kernel.variant, kernel.reason) == (None, "", "no C compiler")


def test_kernel_compiler_that_fails_is_named(tmp_path, monkeypatch):
    script = tmp_path / "broken-cc"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo broken 1.0\necho no such target >&2\nexit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    kernel = open_kernel(BASELINE, str(tmp_path / "cache"))
    assert kernel.library is None
    assert kernel.reason == f"{script} failed for baseline: no such target"
    assert find_library(tmp_path / "cache", BASELINE) is None


def test_unwritable_kernel_cache_is_logged(counted_compiler, tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    assert open_kernel(BASELINE, str(file / "cache")).library is not None
    assert "failed to store compiled kernels" in caplog.text
