"""A cable between two network namespaces, in user space, as not every kernel has netem.

    python -m tests.hosts.link NAMESPACE DEVICE NAMESPACE DEVICE

makes two tap devices and carries frames between them while it runs. A line of standard input sets
`DELAY_MS LOSES_THERE LOSES_BACK`: the delay of either direction, and whether the frames of each are lost.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0002, 0x1000, 0x40000000
MAX_FRAME = 65_536
_POLL_S = 1.0


def tap(namespace: str, name: str) -> int:
    """Return the file of a new tap device in a namespace, which this process enters."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(ends: tuple[int, int]) -> None:
    """Carry frames between two devices until standard input ends."""
    delay_s, loses = 0.0, [False, False]
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    while True:
        due = [queue[0][0] for queue in waiting if queue]
        timeout_s = max(0.0, min(due) - time.monotonic()) if due else _POLL_S
        for ready in select.select([*ends, sys.stdin], [], [], timeout_s)[0]:
            if ready is sys.stdin:
                if not (line := sys.stdin.readline()):
                    return
                numbers = line.split()
                delay_s, loses = float(numbers[0]) / 1e3, [number == "1" for number in numbers[1:]]
            else:
                _take(ready, waiting[ends.index(ready)], delay_s, loses[ends.index(ready)])
        for source, queue in enumerate(waiting):
            while queue and queue[0][0] <= time.monotonic():
                try:
                    os.write(ends[1 - source], queue.popleft()[1])
                except OSError:  # the device is down, or its queue is full: a lost frame
                    pass


def _take(end: int, queue: deque[tuple[float, bytes]], delay_s: float, is_lost: bool) -> None:
    while True:
        try:
            frame = os.read(end, MAX_FRAME)
        except OSError:  # no more frames, or the device is down
            return
        if not is_lost:
            queue.append((time.monotonic() + delay_s, frame))


if __name__ == "__main__":
    pair = tap(sys.argv[1], sys.argv[2]), tap(sys.argv[3], sys.argv[4])
    print("ready", flush=True)
    carry(pair)
