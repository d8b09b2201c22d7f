"""The launcher: starts a whole cluster on this machine, and removes all of it when it stops.

`gammaray up` runs `python -m orchestrator.launcher.cluster`. It deploys workers by the name of their module,
so that neither orchestrator nor workers import the other.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import secrets
import signal
import sys
import tempfile
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import psutil
from pydantic import ValidationError

from gammaray.client.sync_client import Client
from gammaray.config import ClusterSettings, OrchestratorSettings, PoolSize, WorkerSettings, settings_error
from gammaray.deploy.serve_config import APPLICATIONS, GRPC_SERVICERS, SERVE_ENVIRONMENT, role_settings
from gammaray.environment import past_proxies
from gammaray.errors import DeadlineExceededError, GammarayError, InvalidArgumentError, UnavailableError
from gammaray.program.parents import end_with_parent
from gammaray.program.settings import parse_settings
from gammaray.program.shared_options import START_OPTIONS
from orchestrator import hide_torch
from orchestrator.launcher.preflight import (
    check_drafting_head,
    check_host,
    check_models,
    check_port,
    check_workers,
    drafting_notes,
    free_ports,
    worker_cores,
    worker_gpus,
)
from orchestrator.launcher.reaper import MARK, Guardian, children_named, end_marked, runs
from orchestrator.launcher.signals import Stop, StopSignals, silence
from orchestrator.launcher.trust import Trust, arrange_trust, check_access, reachable

if TYPE_CHECKING:
    from orchestrator.launcher.redis_server import RedisServer

# The directory holds Unix sockets, whose paths are limited: of 97 characters for HAProxy, a node's id and
# names take 70, and gammaray-XXXXXXXX 18.
_LONGEST_TEMP = 9
_PROBE_TIMEOUT_S = 5.0

HOST = "127.0.0.1"
_ESSENTIAL = ("gcs_server", "raylet")
_RAY_TRIES = 4
_POLL_S = 0.1
_STATUS_POLL_S = 0.5  # Serve's status takes tens of milliseconds of a core, which starting workers need
_BAD_INPUT = re.compile(r"[\w.]*(UnsupportedVllmError|InvalidArgumentError): ")
_HOPELESS = re.compile(r"[\w.]*(UnsupportedModelError|InvalidModelError)\b")
_ERROR_LINE = re.compile(r"[\w.]+(Error|Exception)\b")
_LOGGED_ERROR = re.compile(r"ERROR (\d{4}-\S+ \S+) (.*)")  # of Ray Serve: the time, and the rest
_NUM_LOGGED = 3


def private_directory() -> Path:
    """Create the directory of one cluster, with a short path."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="gammaray-", dir=parent if len(parent) <= _LONGEST_TEMP else "/tmp"))


def serve_environment(directory: Path, host: str) -> dict[str, str]:
    """Return the environment of a cluster that shares no port, file or token with another on this machine."""
    metrics, stats, fallback_http, fallback_grpc = free_ports(host, 4)
    haproxy = directory / "h"
    # Replicas of all clusters on a host search ports in the same order, so each cluster starts elsewhere.
    first = 20_000 + 20 * secrets.randbelow(200)
    return {
        **SERVE_ENVIRONMENT,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(haproxy / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(haproxy / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(haproxy / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(haproxy),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(haproxy / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 500),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(first + 5_000),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(first + 5_500),
        # Long enough for HAProxy to be updated; the default of 30 s makes every shutdown time out.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        # Without it Serve replaces `print`, with which Python formats tracebacks, by one that writes tuples.
        "RAY_SERVE_LOG_TO_STDERR": "1",
        # setproctitle must not overwrite the environment, in which the guardian looks for `MARK`.
        "SPT_NOENV": "1",
        # Otherwise Ray replaces a loopback address by one at which other machines reach its ports.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


class BadSettingError(GammarayError):
    """A setting that only a worker could check, which it refused."""

    status = grpc.StatusCode.INVALID_ARGUMENT


def main(argv: Sequence[str] | None = None) -> int:
    """Start a cluster, serve until a signal arrives, stop everything; return the exit status."""
    complaints, signals = os.fdopen(os.dup(sys.stderr.fileno()), "w"), StopSignals()
    try:
        settings, options = parse_options(argv)
        announce = announcer(settings, wait_ready=options["wait_ready"])
        if options["die_with_parent"]:
            end_with_parent(signal.SIGTERM)
        signals.take()
        with ExitStack() as started:
            serve_cluster(settings, options["start_timeout_s"], started, signals, announce)
    except Stop:
        return 0
    except GammarayError as error:
        if signals.came:
            return 0
        print(f"gammaray: {error}", file=complaints, flush=True)
        return 2 if isinstance(error, (InvalidArgumentError, BadSettingError)) else 1
    except Exception:  # a bug: print the traceback to the saved stderr, as stderr is silenced by now
        if signals.came:
            return 0
        traceback.print_exc(file=complaints)
        return 1


def parse_options(argv: Sequence[str] | None = None) -> tuple[ClusterSettings, dict[str, Any]]:
    """Return the cluster's settings and the values of `START_OPTIONS` that a command line gives."""
    return parse_settings(ClusterSettings, "python -m orchestrator.launcher.cluster", argv, START_OPTIONS)


def announcer(settings: ClusterSettings, *, wait_ready: bool) -> Callable[[], None]:
    """Return a function that announces on standard output that the cluster serves.

    All other output of this process and its children to standard output is redirected to standard error, so
    that scripts read only the announcement.
    """
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    host = reachable(settings.host)
    url, address = f"http://{host}:{settings.http_port}", f"{host}:{settings.grpc_port}"
    text = f"OpenAI-compatible HTTP: {url}/v1\ngRPC: {address}\nCtrl-C stops everything."
    if wait_ready:
        text = f"ready http={url} grpc={address}"
    return partial(print, text, file=output, flush=True)


def serve_cluster(
    settings: ClusterSettings,
    start_timeout_s: float,
    started: ExitStack,
    signals: StopSignals,
    announce: Callable[[], None],
) -> NoReturn:
    """Start the cluster, announce it, and monitor it until a signal interrupts.

    `started` receives a callback for each started part, which stops it.
    """
    deadline = time.monotonic() + start_timeout_s
    check_access(settings)
    check_workers(settings)
    check_host(settings.host)
    check_port("http_port", settings.host, settings.http_port)
    check_port("grpc_port", settings.host, settings.grpc_port)
    if settings.http_port == settings.grpc_port:
        raise InvalidArgumentError("grpc_port", settings.grpc_port, "another port than http_port")
    draft = settings.draft if settings.draft_workers.maximum else settings.target
    check_drafting_head(settings.head)
    for note in [*check_models(settings.target, draft, settings.engine), *drafting_notes(settings)]:
        print(f"gammaray: {note}", file=sys.stderr, flush=True)
    # These imports are slow, so they come after the cheap checks.
    if settings.redis_url:
        from orchestrator.storage.client import check_redis
        from orchestrator.storage.keys import Keys
        from orchestrator.storage.registry import check_unused

        # The password may be in the environment, as GAMMARAY_REDIS_PASSWORD, and the prefix is.
        used = OrchestratorSettings(redis_url=settings.redis_url)
        check_redis(used.redis_login_url)
        if settings.target_workers.maximum:  # else these orchestrators join others
            asyncio.run(check_unused(used.redis_login_url, Keys(used.redis_prefix)))
    else:
        from orchestrator.launcher.redis_server import redis_binary

        redis_binary()  # raises if there is none

    with signals.held():  # without a guardian the directory would not be removed
        directory = private_directory()
        guardian = Guardian(directory.name, directory)
        started.callback(guardian.dismiss)
    hosts = "localhost", HOST, reachable(settings.host)
    os.environ.update(past_proxies(os.environ, *dict.fromkeys(hosts)))
    os.environ.update({MARK: directory.name, **serve_environment(directory, HOST)})
    os.environ.pop("RAY_ADDRESS", None)  # always start a new cluster
    start_ray(directory, started, signals, deadline)
    signals.check()
    _start_serve(settings, started)
    redis = None if settings.redis_url else _start_redis(directory, started)
    trust = arrange_trust(settings)
    _deploy(settings, settings.redis_url if redis is None else redis.url, trust)
    try:
        _wait_until_healthy(settings, deadline, trust.api_key)
    except DeadlineExceededError as error:
        logged = "; ".join(["", *serve_errors(directory)])  # the directory and its logs are removed
        raise DeadlineExceededError(f"{error}{logged}") from None
    signals.check()
    announce()
    _watch(redis)


def start_ray(directory: Path, started: ExitStack, signals: StopSignals, deadline: float) -> None:
    """Start a local Ray cluster, with up to `_RAY_TRIES` attempts until the deadline."""
    import ray  # reads the environment, so all variables must be set before

    started.callback(_stop_ray)
    for attempt in range(1, _RAY_TRIES + 1):
        try:
            with signals.kept():
                ray.init(
                    address="local",
                    num_cpus=1,  # logical; no actor requests any, and Ray starts a spare worker for each
                    object_store_memory=80 * 2**20,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(directory / "ray"),
                    _node_ip_address=HOST,
                )
            signals.take()  # Ray's core has installed C handlers, which abort the process
            return
        except Exception as error:
            signals.check()
            # Ray times out after 30 s; on a busy machine the start may take longer, more than once.
            end_marked(directory.name)
            if attempt == _RAY_TRIES or time.monotonic() >= deadline:
                raise UnavailableError(f"Ray failed to start: {error}") from error


def _start_serve(settings: ClusterSettings, started: ExitStack) -> None:
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": settings.host, "port": settings.http_port},
            grpc_options={"port": settings.grpc_port, "grpc_servicer_functions": list(GRPC_SERVICERS)},
            logging_config={"log_level": "WARNING", "enable_access_log": False},
        )
    except Exception as error:
        raise UnavailableError(f"Ray Serve failed to start: {error}") from error
    started.callback(_stop_serve)


def _stop_serve() -> None:
    from ray import serve

    silence()
    if len(children_named(_ESSENTIAL)) == len(_ESSENTIAL):  # else it would block for half a minute
        serve.shutdown()  # type: ignore[no-untyped-call]


def _stop_ray() -> None:
    import ray

    silence()
    ray.shutdown()


def _start_redis(directory: Path, started: ExitStack) -> RedisServer:
    from orchestrator.launcher.redis_server import RedisServer, default_maxmemory
    from orchestrator.storage.client import check_redis

    server = RedisServer.start(directory / "redis", default_maxmemory())
    started.callback(server.stop)
    check_redis(server.url)  # the machine's own may be too old
    return server


def _deploy(settings: ClusterSettings, redis_url: str, trust: Trust) -> None:
    """Deploy the applications; they start at the same time."""
    import ray
    from ray import serve

    from orchestrator.app import build

    shared, of_role = {"redis_url": redis_url}, role_settings(settings)
    workers: dict[str, tuple[dict[str, Any], PoolSize]] = {
        "target": (of_role["target"], settings.target_workers),
        "draft": (of_role["draft"], settings.draft_workers),
    }
    num_gpus = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    gpus = worker_gpus(settings, num_gpus)
    environment: dict[str, Any] = {}
    usual = WorkerSettings(**environment)
    cores: dict[str, tuple[int, ...]] = dict.fromkeys(workers, ())
    if not gpus["target"] and hasattr(psutil.Process, "cpu_affinity"):
        most = settings.target_workers.maximum, settings.draft_workers.maximum
        cores = worker_cores(psutil.Process().cpu_affinity(), *most, usual.threads)
    for role, (own, _) in workers.items():
        if 0 < gpus[role] < 1:  # workers share a GPU, and its memory
            own["cache_memory_share"] = usual.cache_memory_share * gpus[role]
    # Targets report their load even if only the drafters scale: an empty draft pool scales up by it.
    scaling: dict[str, Any] | None = {} if any(size.is_elastic for _, size in workers.values()) else None
    targets = []
    for role, (own, size) in workers.items():
        if size.maximum:
            worker = _build(role, {**shared, **own}, size, gpus[role], scaling, cores[role])
            targets.append(serve.RunTarget(worker, APPLICATIONS[role].name, None))
    orchestrator = {**shared, **trust.orchestrator, **of_role["orchestrator"]}
    key, local_only = trust.probe_key_sha256, trust.local_only
    application = build(orchestrator, settings.orchestrators, probe_key_sha256=key, local_only=local_only)
    targets.append(serve.RunTarget(application, APPLICATIONS["orchestrator"].name, "/"))
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _build(
    role: str,
    settings: dict[str, Any],
    size: PoolSize,
    num_gpus: float,
    scaling: dict[str, Any] | None,
    cores: Collection[int],
) -> Any:
    application = importlib.import_module("services.serve.app")
    resources = {"num_cpus": 0, "num_gpus": num_gpus}
    try:
        return application.build(role, settings, size, resources, scaling, cores=cores)
    except ValidationError as error:  # settings from the environment that are not ClusterSettings
        raise settings_error(error) from None


def _wait_until_healthy(settings: ClusterSettings, deadline: float, api_key: str | None) -> None:
    """Wait until both APIs answer and report every worker."""
    from ray import serve

    missing = "applications"
    while time.monotonic() < deadline:
        applications = serve.status().applications
        for name, application in applications.items():
            reason = _reason(application)
            if refused := _BAD_INPUT.match(reason):
                raise BadSettingError(reason[refused.end() :])
            # Serve would retry, but a model that cannot be served will not become so.
            if application.status == "DEPLOY_FAILED" or _HOPELESS.match(reason):
                raise UnavailableError(f"{name} cannot start: {reason}")
        waiting = [name for name, application in applications.items() if application.status != "RUNNING"]
        missing = ", ".join(waiting) or missing_parts(settings, reachable(settings.host), api_key)
        if not missing:
            return
        time.sleep(_STATUS_POLL_S)
    ended = _num_out_of_memory()
    why = f"; {ended} processes were ended, as this machine has too little free memory" if ended else ""
    raise DeadlineExceededError(f"the cluster did not become ready in time; still missing: {missing}{why}")


def _num_out_of_memory() -> int:
    """Return how many processes Ray has ended for want of memory; 0 if it gives no answer in 30 s."""
    import ray
    from ray.util.state import list_workers

    try:
        address = ray.get_runtime_context().gcs_address
        return len(list_workers(address, filters=[("exit_type", "=", "NODE_OUT_OF_MEMORY")]))
    except Exception:  # of several kinds; what is missing is the news
        return 0


def _reason(application: Any) -> str:
    """Return the cause of a failed deployment: the last line of its messages that names an error."""
    stories = [application.message, *(deployment.message for deployment in application.deployments.values())]
    lines = [line.strip() for story in stories for line in story.splitlines()]
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return str((errors or [line for line in lines if line] or ["no reason given"])[-1])


def serve_errors(directory: Path) -> list[str]:
    """Return the last errors that Ray Serve logged, of all its processes: "file: line", the latest last."""
    found = []
    for path in (directory / "ray" / "session_latest" / "logs" / "serve").glob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if match := _LOGGED_ERROR.match(line):
                found.append((match[1], f"{path.name}: {match[2]}"))
    return [line for _, line in sorted(found)[-_NUM_LOGGED:]]


def _watch(redis: RedisServer | None) -> NoReturn:
    """Wait for a signal, or for the end of a process that is not restarted; restart the private Redis."""
    essential = children_named(_ESSENTIAL)
    while True:
        for process, name in essential.items():
            if not runs(process):
                raise UnavailableError(f"{name} (process {process.pid}) ended and is not restarted")
        if redis is not None and not redis.is_running:
            redis.revive()
        time.sleep(_POLL_S)


def missing_parts(settings: ClusterSettings, host: str, api_key: str | None = None) -> str:
    """Return a description of the first part that does not serve yet; empty when all parts serve."""
    # Without targets here, the API is healthy once another host's target has come.
    path = "/health" if settings.target_workers.maximum else "/"
    if not _http_answers(f"http://{host}:{settings.http_port}{path}"):
        return "a healthy HTTP API"
    # Each orchestrator discovers the workers itself; each new connection goes to the next orchestrator.
    for _ in range(1 if settings.orchestrators == 1 else 2 * settings.orchestrators):
        try:
            with Client(f"{host}:{settings.grpc_port}", api_key=api_key) as client:
                processes = client.status(timeout_s=_PROBE_TIMEOUT_S)
        except GammarayError as error:
            return f"a response of the gRPC API ({error})"
        healthy = Counter(process.role for process in processes if process.healthy)
        least = settings.target_workers.minimum, settings.draft_workers.minimum, 1
        for role, count in zip(("target", "draft", "redis"), least, strict=True):
            if healthy[role] < count:
                return f"{count - healthy[role]} more {role} process"
    return ""


def _http_answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's errors are subclasses
        return False


if __name__ == "__main__":
    hide_torch()
    sys.exit(main())
