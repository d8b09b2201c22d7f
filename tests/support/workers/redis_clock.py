"""A clock for the redis-servers of a test, which the test sets."""

import mmap
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUILD_S = 60.0
"""Until the compiler must have ended."""


@contextmanager
def redis_clock(folder: Path, fixed_us: int = 0) -> Iterator[tuple[mmap.mmap, dict[str, str]]]:
    """Make a clock, with its files in a folder.

    Yields its two numbers, in microseconds: a fixed time or 0, and an offset to the machine's time, used
    without a fixed one; and the variables of a redis-server with this clock.
    """
    library, path = folder / "clock.so", folder / "clock"
    source = Path(__file__).with_suffix(".c")
    command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=BUILD_S)
    path.write_bytes(struct.pack("qq", fixed_us, 0))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 16) as numbers:
        yield numbers, {"LD_PRELOAD": str(library), "REDIS_CLOCK": str(path)}
