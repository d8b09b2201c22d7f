"""A TCP relay on loopback that delays what passes, as a network of that round-trip time would."""

from __future__ import annotations

import queue
import socket
import threading
import time

__all__ = ["Relay"]

_HOST = "127.0.0.1"
_CHUNK = 2**16


class Relay:
    """Accepts connections and passes their bytes on, delayed.

    Bytes of several messages are under way at once: the delay does not limit the throughput. Threads sleep
    with a precision of some 0.1 ms, which the timers of an event loop do not have.

    Attributes:
        address: Its own host:port; connections wait there until `start`.
        delay_s: Added round-trip time: half of it in each direction. It may be changed at any time.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((_HOST, 0))
        self._ends: list[socket.socket] = []
        self.address = f"{_HOST}:{self._listener.getsockname()[1]}"
        self.delay_s = 0.0

    def start(self, target: str) -> None:
        """Accept connections from now on, and connect each to `target`, host:port."""
        host, _, port = target.rpartition(":")
        threading.Thread(target=self._accept, args=((host, int(port)),), daemon=True).start()

    def close(self) -> None:
        """Close the port and all connections."""
        _close(self._listener)
        self._close_ends()

    def _close_ends(self) -> None:
        for end in self._ends:
            _close(end)

    def _accept(self, target: tuple[str, int]) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed, perhaps while the last connection was being made
                self._close_ends()
                return
            self._ends.append(near)
            try:
                far = socket.create_connection(target)
                self._ends.append(far)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                _close(near)
                continue
            for source, sink in ((near, far), (far, near)):
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._read, args=(source, waiting), daemon=True).start()
                threading.Thread(target=self._write, args=(waiting, sink), daemon=True).start()

    def _read(self, source: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        data = b"-"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self.delay_s / 2, data))

    def _write(self, waiting: queue.SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return


def _close(end: socket.socket) -> None:
    # `close` alone would not wake the threads that wait for this socket.
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # not connected, or not any more
    end.close()
