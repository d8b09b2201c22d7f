"""The environment that Ray and Serve read when they are imported: to be set before that."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from gammaray.deploy.serve_config import SERVE_ENVIRONMENT
from orchestrator.preflight import free_ports

__all__ = ["private_directory", "serve_environment"]

# Unix sockets lie below it, whose paths may have 107 characters (97 for HAProxy), node ids included.
_LONGEST_TEMP = 12


def private_directory() -> Path:
    """Create the directory of one cluster, with a short path."""
    parent = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="gammaray-", dir=parent if len(parent) <= _LONGEST_TEMP else "/tmp"))


def serve_environment(directory: Path, host: str) -> dict[str, str]:
    """Return the variables for a cluster of its own, that shares no port, file or token with another.

    They are `SERVE_ENVIRONMENT` and what keeps clusters on one machine apart.
    """
    metrics, stats, fallback_http, fallback_grpc = free_ports(host, 4)
    haproxy = directory / "h"
    # Replicas of clusters on one host look for free ports in the same order; start each elsewhere.
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
        # Long enough for HAProxy to hear of it; the default of 30 s makes every shutdown time out.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Who changes its title must not overwrite its environment: the guardian knows it by a mark in there.
        "SPT_NOENV": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
