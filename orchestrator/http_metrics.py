"""Where Prometheus finds the metrics of every process: its HTTP service discovery asks here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from gammaray.processes import ProcessStatus
from orchestrator.backend import Backend

__all__ = ["add_targets", "targets"]


def add_targets(app: FastAPI, backend: Backend) -> None:
    """Add GET /metrics/targets, the answer of which Prometheus's `http_sd_configs` takes."""

    @app.get("/metrics/targets")
    async def metrics_targets() -> list[dict[str, Any]]:
        return targets(await backend.status())


def targets(processes: list[ProcessStatus]) -> list[dict[str, Any]]:
    """Return the processes that serve metrics, in the form of Prometheus's HTTP service discovery."""
    return [
        {
            "targets": [process.metrics_address],
            "labels": {"process": process.role, "pid": str(process.pid)},
        }
        for process in processes
        if process.metrics_address
    ]
