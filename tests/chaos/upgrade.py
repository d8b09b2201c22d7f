"""A `--upgrade` run: a cluster of two versions, in both orders, and rolling upgrades under load."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from gammaray import Client
from orchestrator.launcher.redis_server import RedisServer
from tests.chaos.chaos_drafters import PAIR, Way
from tests.chaos.stage import Trouble
from tests.support.cluster.cluster_helpers import info_of
from tests.support.cluster.ray_start import START_TIMEOUT_S

ROOT = Path(__file__).parents[2]
BEFORE = "892ee593"
"""Commit of version 0.2.0."""

WORKERS = ("target", "draft")
MIXTURES: tuple[tuple[str, dict[str, str]], ...] = (
    ("workers upgraded, orchestrators old", dict.fromkeys(WORKERS, "new")),
    ("orchestrators upgraded", {"orchestrator": "new"}),
    ("workers rolled back, orchestrators new", dict.fromkeys(WORKERS, "old")),
    ("workers upgraded again", dict.fromkeys(WORKERS, "new")),
)
STAY_S = 6.0
"""How long each mixture serves."""

ANSWER_TIMEOUT_S = START_TIMEOUT_S + 60.0
"""The cluster's program gives up before, and says why."""


@dataclass
class Versions:
    """A cluster whose roles come from trees of two versions.

    Attributes:
        http: Base URL of the HTTP API.
        grpc: Address of the gRPC API.
        now: Version of each role.
        ways: To draft for its streams.
    """

    http: str
    grpc: str
    now: dict[str, str]
    _trees: dict[str, str]
    _process: subprocess.Popen[str]
    ways: tuple[Way, ...] = PAIR

    def deploy(self, changes: dict[str, str]) -> None:
        """Replace roles by another version; returns when all of it runs.

        Raises:
            AssertionError: A process is not of the version that it should be.
        """
        self.now |= changes
        trees = {role: self._trees[version] for role, version in self.now.items()}
        assert self._process.stdin is not None
        print(json.dumps(trees), file=self._process.stdin, flush=True)
        assert _answer(self._process) == ["deployed"], "the cluster's program ended"
        with Client(self.grpc) as client:
            processes = [one for one in client.status(timeout_s=60) if one.role in self.now and one.healthy]
        for one in processes:
            if one.role in WORKERS:
                assert bool(info_of(one).protocol) == (self.now[one.role] == "new"), one
            elif psutil.pid_exists(one.pid):  # a replaced one is known for some more seconds
                assert psutil.Process(one.pid).environ()["PYTHONPATH"] == trees[one.role], one


def _answer(process: subprocess.Popen[str], timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
    """Return the words of the program's next line, which it writes at once; none if it has ended.

    Raises:
        AssertionError: No line comes in time.
    """
    assert process.stdout is not None
    is_there, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert is_there, f"the cluster's program has not answered for {timeout_s:g} s"
    return process.stdout.readline().split()


@contextmanager
def versions(commit: str, stderr: int | None) -> Iterator[Versions]:
    """Run a cluster of a commit; its tree stands beside this one."""
    with TemporaryDirectory() as folder, RedisServer.start(Path(folder, "redis")) as redis:
        old = Path(folder, "old")
        old.mkdir()
        archive = subprocess.run(
            ["git", "archive", commit, "gammaray", "orchestrator", "services"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            timeout=60,
        )
        subprocess.run(["tar", "-x", "-C", str(old)], input=archive.stdout, check=True, timeout=60)
        command = [sys.executable, "-m", "tests.support.cluster.served_versions", redis.url]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        try:
            word, http, grpc = _answer(process) or ("the cluster's program ended", "", "")
            assert word == "ready", word
            trees = {"old": str(old), "new": str(ROOT)}
            now = dict.fromkeys(("orchestrator", *WORKERS), "old")
            cluster = Versions(f"http://{http}", grpc, now, trees, process)
            cluster.deploy({})
            yield cluster
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def _deployed(cluster: Versions, changes: dict[str, str]) -> Iterator[None]:
    cluster.deploy(changes)
    yield


STEPS = [Trouble(name, STAY_S, partial(_deployed, changes=changes)) for name, changes in MIXTURES]
