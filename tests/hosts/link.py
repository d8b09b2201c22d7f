"""A cable between two network namespaces, in user space, as not every kernel has netem.

    python -m tests.hosts.link NAMESPACE DEVICE NAMESPACE DEVICE

makes two tap devices and carries frames between them while it runs. A line of standard input sets
`LOSES_THERE LOSES_BACK`, each 0 or 1: whether the frames of that direction are lost.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
MAX_FRAME = 65_536


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def tap(namespace: str, name: str) -> int:
    """Return the file of a new tap device in a namespace, which this process enters."""
    enter(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(ends: tuple[int, int]) -> None:
    """Carry frames between two devices until standard input ends."""
    loses = [False, False]
    while True:
        for ready in select.select([*ends, sys.stdin], [], [])[0]:
            if ready is not sys.stdin:
                side = ends.index(ready)
                _carry_on(ready, ends[1 - side], is_lost=loses[side])
            elif line := sys.stdin.readline():
                loses = [number == "1" for number in line.split()]
            else:
                return


def _carry_on(source: int, goal: int, *, is_lost: bool) -> None:
    while True:
        try:
            frame = os.read(source, MAX_FRAME)
        except OSError:  # no more frames, or the device is down
            return
        if not is_lost:
            with suppress(OSError):  # the device is down, or its queue is full: a lost frame
                os.write(goal, frame)


if __name__ == "__main__":
    pair = tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])
    print("ready", flush=True)
    carry(pair)
