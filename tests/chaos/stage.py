"""Clusters of chaos runs, by what drafts: draft workers with a model, or a head; and what befalls them."""

import contextlib
import itertools
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psutil

from gammaray.demo_pair import resolve_model
from gammaray.deploy.serve_config import APPLICATIONS
from orchestrator.launcher.redis_server import RedisServer
from tests.chaos.chaos_drafters import DRAFTER, HEAD, PAIR, Way
from tests.chaos.network.links import Link, Network
from tests.chaos.network.network_redis import NetworkRedis, network_redis, small_disk
from tests.support.cluster.cluster_helpers import Cluster, running_cluster
from tests.support.drafter_helpers import make_drafter
from tests.support.head_helpers import bigram_head
from tests.support.workers.redis_helpers import port_of

KINDS: dict[str, tuple[Way, ...]] = {"model": PAIR, "parallel": DRAFTER, "early-exit": DRAFTER, "head": HEAD}
ROLES = ("draft", "target", "orchestrator", "proxy", "redis")
CLUSTER_MB = 256
REVIVE_EVERY_S = 0.05

_STARTING = ("initialize", "__init__")


@dataclass(frozen=True)
class Stage:
    cluster: Cluster  # the processes
    ways: tuple[Way, ...]  # to draft for its streams
    network: Network  # the links to the workers; also those below
    apis: dict[str, Link]  # links to the gRPC and to the HTTP API
    redis: RedisServer | NetworkRedis  # restarted when it dies; or two servers behind links, with Sentinel
    disk: Path | None = None  # small file system of the cluster's own files; None: there is none

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.apis['grpc'].port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.apis['http'].port}"

    def find(self, role: str) -> list[psutil.Process]:
        """Return the serving processes of a role, oldest first."""
        if role == "redis":
            assert isinstance(self.redis, RedisServer)
            with contextlib.suppress(psutil.NoSuchProcess):
                return [psutil.Process(self.redis.pid)]
            return []
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and _is(process, role):
                    found.append((process.create_time(), process))
        return [process for _, process in sorted(found, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Done:
    killed: tuple[str, ...] = ()  # roles of the processes that it killed
    more: str = ""  # to add to its name


@dataclass(frozen=True)
class Trouble:
    name: str  # in the report
    seconds: float  # how long it lasts
    during: Callable[[Any], AbstractContextManager[Done | None]]  # context in which it lasts


@contextmanager
def stage_of(
    kind: str = "model", *, has_network_faults: bool = False, engine: str = "auto", stderr: int | None = None
) -> Iterator[Stage]:
    """Run a cluster of two orchestrators, two target workers and what drafts.

    Args:
        kind: One of `KINDS`.
        has_network_faults: Give it a Redis with a replica and Sentinel, and the cluster's own files a small
            disk, if the machine lets us mount one.
        engine: Of the workers. vLLM computes the same bits in every batch on GPUs only: elsewhere its tokens
            are the same up to ties.
        stderr: Where the standard error of its processes goes.
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network())
        options = ["--orchestrators", "2", "--target-workers", "2", "--engine", engine]
        options += [] if engine == "vllm" else ["--deterministic"]
        options += _of_kind(kind, Path(stack.enter_context(TemporaryDirectory())))
        redis: RedisServer | NetworkRedis
        temporary, disk = {}, None
        if has_network_faults:
            redis = stack.enter_context(network_redis(network))
            url = redis.url
            stack.callback(shutil.rmtree, folder := _short_directory(), ignore_errors=True)
            disk, temporary = stack.enter_context(small_disk(folder, CLUSTER_MB)), {"TMPDIR": str(folder)}
        else:
            redis = stack.enter_context(revived_redis())
            link = network.link(port_of(redis.url), announces=True)
            url = redis.url.replace(f":{link.target}/", f":{link.port}/")
        with patch.dict("os.environ", temporary):
            cluster = stack.enter_context(running_cluster(*options, "--redis-url", url, stderr=stderr))
        addresses = {"grpc": cluster.grpc, "http": cluster.http}
        apis = {name: network.link(int(one.rpartition(":")[2])) for name, one in addresses.items()}
        yield Stage(cluster, KINDS[kind], network, apis, redis, disk)


def _of_kind(kind: str, folder: Path) -> list[str]:
    """Return the options of a cluster that say what drafts."""
    drafts, target = ["--draft-workers", "2"], Path(resolve_model("demo", "target"))
    if kind == "parallel":
        how = {"pard_token": 0, "mask_embedding": True, "draft_vocab_size": 1500, "target": target}
        drafter = make_drafter(Path(resolve_model("demo", "draft")), folder / "drafter", **how)
        # Neither its int8 weights nor a token that it lacks may change a token of the text.
        return [*drafts, "--target", "demo", "--draft", str(drafter), "--draft-weights", "int8"]
    if kind == "head":
        head = bigram_head(folder / "head", target)
        return ["--draft-workers", "0", "--target", "demo", "--head", str(head)]
    return [*drafts, *(("--target", "demo", "--draft", "early-exit:13") if kind == "early-exit" else ())]


@contextmanager
def revived_redis() -> Iterator[RedisServer]:
    """Run a server that is restarted when it dies; it ends with the thread that started it."""
    started, ending = threading.Event(), threading.Event()
    found: list[RedisServer] = []

    def keep() -> None:
        with TemporaryDirectory() as folder, RedisServer.start(Path(folder)) as server:
            found.append(server)
            started.set()
            while not ending.wait(REVIVE_EVERY_S):
                if not server.is_running:
                    server.revive()

    keeper = threading.Thread(target=keep, daemon=True)
    keeper.start()
    assert started.wait(60), "Redis did not start"
    try:
        yield found[0]
    finally:
        ending.set()
        keeper.join(60)


def _short_directory() -> Path:
    """Create a directory with a path that is short enough for the launcher's sockets."""
    for number in itertools.count():
        with contextlib.suppress(FileExistsError):
            (folder := Path(f"/tmp/g{number}")).mkdir()
            break
    return folder


def _is(process: psutil.Process, role: str) -> bool:
    if role == "proxy":
        return process.name() == "haproxy"
    title = " ".join(process.cmdline())
    is_of_role = title.startswith(f"ray::ServeReplica:{APPLICATIONS[role].name}:")
    return is_of_role and not any(word in title for word in _STARTING)
