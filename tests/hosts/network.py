"""Hosts that are network namespaces on a switch of their own: no route leads to any other network.

Each host has its own addresses, ports and abstract sockets; they share files, memory and processors.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"
_END_S = 20.0


def missing() -> str:
    """Why this machine can have no such hosts; empty if it can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "hosts are network namespaces, which need root on Linux"
    if shutil.which("ip") is None:
        return "hosts are network namespaces: the command ip (Debian's iproute2) is not installed"
    if not os.access("/dev/net/tun", os.W_OK):
        return "cables are tap devices: there is no /dev/net/tun"
    made = subprocess.run(["ip", "netns", "add", name := f"gm-{os.getpid()}"], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@dataclass
class Host:
    name: str
    namespace: str
    address: str  # its address on the switch
    folder: Path
    cable: subprocess.Popen[str]  # the process that carries its frames
    # Standard output and error of each process that it started.
    logs: list[Path] = field(default_factory=list)

    def start(
        self, label: str, command: Sequence[str], environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[str]:
        """Start a process in the host; its output goes to a file, unless `options` says otherwise."""
        log = self.folder / f"{label}-{len(self.logs)}.log"
        self.logs.append(log)
        with open(log, "w") as file:
            into = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, **options}
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *command], env=dict(environment), text=True, **into
            )

    def set_link(self, *, hears: bool = True, is_heard: bool = True) -> None:
        """Set in which directions the cable carries frames."""
        assert self.cable.stdin is not None
        self.cable.stdin.write(f"{int(not hears)} {int(not is_heard)}\n")
        self.cable.stdin.flush()

    def pids(self) -> list[int]:
        """Return the processes of the host, without that of its cable and this one."""
        own, found = os.stat(f"/var/run/netns/{self.namespace}").st_ino, []
        for path in Path("/proc").glob("[0-9]*/ns/net"):
            with suppress(OSError):
                if path.stat().st_ino == own:
                    found.append(int(path.parts[2]))
        return [pid for pid in found if pid not in (self.cable.pid, os.getpid())]

    def cut_power(self) -> None:
        """End every process at once, without a word to its peers."""
        self.set_link(hears=False, is_heard=False)
        self.signal(signal.SIGKILL)

    def end(self, signum: int = signal.SIGTERM) -> None:
        """End every process of the host by a signal, and by force after some seconds."""
        self.signal(signum)
        ends = time.monotonic() + _END_S
        while self.pids() and time.monotonic() < ends:
            time.sleep(0.1)
        self.signal(signal.SIGKILL)

    def signal(self, signum: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


class Network:
    """A switch, and the hosts on it."""

    def __init__(self, folder: Path) -> None:
        self.hosts: dict[str, Host] = {}
        self._folder = folder
        self._prefix = f"gm{os.getpid()}"
        self._switch = f"{self._prefix}-switch"

    @classmethod
    @contextmanager
    def made(cls, folder: Path) -> Iterator["Network"]:
        """Make the switch, and remove it with all hosts in the end."""
        network = cls(folder)
        _ip("netns", "add", network._switch)
        try:
            _ip("-n", network._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", network._switch, "link", "set", "br0", "up")
            yield network
        finally:
            for host in network.hosts.values():
                host.signal(signal.SIGTERM)
            for host in network.hosts.values():
                host.end()
                host.cable.kill()
                host.cable.wait(_END_S)
                _ip("netns", "del", host.namespace)
            _ip("netns", "del", network._switch)

    def add(self, name: str) -> Host:
        number, namespace = len(self.hosts) + 2, f"{self._prefix}-{name}"
        address, port = f"{SUBNET}.{number}", f"port{number}"
        _ip("netns", "add", namespace)
        command = [sys.executable, "-m", "tests.hosts.link", self._switch, port, namespace, "eth0"]
        cable = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert cable.stdout is not None
        assert cable.stdout.readline() == "ready\n"
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        folder = self._folder / name
        folder.mkdir()
        self.hosts[name] = host = Host(name, namespace, address, folder, cable)
        return host
