"""A `--upgrade` run: a cluster of two versions, in both orders, and rolling upgrades under load."""

import json
import subprocess
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
from tests.support.cluster.cluster_helpers import ROOT, Program, info_of, program
from tests.support.cluster.ray_start import START_TIMEOUT_S

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
    """A cluster whose roles come from trees of two versions."""

    http: str  # base URL of the HTTP API
    grpc: str  # address of the gRPC API
    now: dict[str, str]  # version of each role
    _trees: dict[str, str]
    _program: Program
    ways: tuple[Way, ...] = PAIR  # to draft for its streams

    def deploy(self, changes: dict[str, str]) -> None:
        """Replace roles by another version, and check that all of it runs."""
        self.now |= changes
        trees = {role: self._trees[version] for role, version in self.now.items()}
        assert self._program.ask(json.dumps(trees), ANSWER_TIMEOUT_S) == "deployed", "its program ended"
        with Client(self.grpc) as client:
            processes = [one for one in client.status(timeout_s=60) if one.role in self.now and one.healthy]
        for one in processes:
            if one.role in WORKERS:
                assert bool(info_of(one).protocol) == (self.now[one.role] == "new"), one
            elif psutil.pid_exists(one.pid):  # a replaced one is known for some more seconds
                assert psutil.Process(one.pid).environ()["PYTHONPATH"] == trees[one.role], one


@contextmanager
def versions(commit: str, stderr: int | None) -> Iterator[Versions]:
    """Run a cluster of a commit; its tree stands beside this one."""
    with TemporaryDirectory() as folder, RedisServer.start(Path(folder, "redis")) as redis:
        old = Path(folder, "old")
        old.mkdir()
        copy = f"git archive {commit} gammaray orchestrator services | tar -x -C {old}"
        subprocess.run(copy, shell=True, cwd=ROOT, check=True, timeout=120)
        with program("served_versions", redis.url, stderr=stderr) as served:
            word, http, grpc = (served.answer(ANSWER_TIMEOUT_S) or "ended - -").split()
            assert word == "ready", word
            trees = {"old": str(old), "new": str(ROOT)}
            now = dict.fromkeys(("orchestrator", *WORKERS), "old")
            cluster = Versions(f"http://{http}", grpc, now, trees, served)
            cluster.deploy({})
            yield cluster


@contextmanager
def _deployed(cluster: Versions, changes: dict[str, str]) -> Iterator[None]:
    cluster.deploy(changes)
    yield


STEPS = [Trouble(name, STAY_S, partial(_deployed, changes=changes)) for name, changes in MIXTURES]
