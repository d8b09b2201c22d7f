"""The proxy processes of this node: HAProxy in front, and Serve's own that watch over it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import psutil

from gammaray.types import ProcessStatus

__all__ = ["find_proxies"]

_HTTP_BIND = re.compile(r"^frontend http_frontend\s+bind (\S+)", re.MULTILINE)
_TITLES = ("ray::HAProxyManager", "ray::ProxyActor")


def find_proxies() -> list[ProcessStatus]:
    """Return the proxies that share this process's Ray node, found among the node's processes.

    Serve does not tell their pids. A replica's parent is its node's raylet, and so is that of Serve's own
    proxy actors; HAProxy is their child, and its configuration file says where it listens.
    """
    found = []
    for process in _children(os.getppid()):  # any of them may end while it is looked at
        title = " ".join(_command(process))
        if not title.startswith(_TITLES):
            continue
        found.append(ProcessStatus("proxy", process.pid, "", "", _is_alive(process), 0))
        for child in _children(process.pid, recursive=True):
            if address := _haproxy_address(_command(child)):
                found.append(ProcessStatus("proxy", child.pid, address, "", _is_alive(child), 0))
    return found


def _children(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive))
    except psutil.Error:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _haproxy_address(command: Sequence[str]) -> str:
    """Return where the HAProxy of a command line serves HTTP, "" when it is none."""
    if "-f" not in command[:-1]:
        return ""
    try:
        config = Path(command[command.index("-f") + 1]).read_text()
    except OSError:
        return ""
    match = _HTTP_BIND.search(config)
    return match[1] if match else ""
