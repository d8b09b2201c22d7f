"""Whether a cluster that was just started serves all that was asked for."""

from __future__ import annotations

import urllib.request
from collections import Counter

from gammaray.client.sync_client import Client
from gammaray.config import ClusterSettings
from gammaray.errors import GammarayError

__all__ = ["missing_parts"]

_TIMEOUT_S = 5.0


def missing_parts(settings: ClusterSettings, host: str, api_key: str | None = None) -> str:
    """Return what does not serve yet, in words; nothing when all does."""
    if not _http_answers(f"http://{host}:{settings.http_port}/health"):
        return "a healthy HTTP API"
    # Each orchestrator finds the workers for itself, and a new connection goes to the next one.
    for _ in range(1 if settings.orchestrators == 1 else 2 * settings.orchestrators):
        try:
            with Client(f"{host}:{settings.grpc_port}", api_key=api_key) as client:
                processes = client.status(timeout_s=_TIMEOUT_S)
        except GammarayError as error:
            return f"an answer of the gRPC API ({error})"
        healthy = Counter(process.role for process in processes if process.healthy)
        wanted = {
            "target": settings.target_workers.minimum,
            "draft": settings.draft_workers.minimum,
            "redis": 1,
        }
        for role, count in wanted.items():
            if healthy[role] < count:
                return f"{count - healthy[role]} more {role} process"
    return ""


def _http_answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except OSError:  # urllib's errors too
        return False
