"""Metrics over HTTP: the addresses of all processes for Prometheus, and metrics by vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import fastapi
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gammaray.errors import UnavailableError
from gammaray.types import ProcessStatus, SpeculationTotals
from orchestrator.backend import Backend

__all__ = ["add_metrics", "targets", "vllm_metrics"]

_ENGINE = "0"
"""Value of vLLM's label `engine`: all orchestrators together are one."""


def add_metrics(app: FastAPI, backend: Backend) -> None:
    """Add GET /metrics, and GET /metrics/targets for the `http_sd_configs` of Prometheus."""

    @app.get("/metrics")
    async def metrics() -> fastapi.Response:
        processes = await backend.status()
        if any(process.role == "redis" and not process.healthy for process in processes):
            # Without the other orchestrators the sums would fall, which a scraper takes for a restart.
            raise UnavailableError("Redis cannot be reached, which knows the other orchestrators")
        return fastapi.Response(vllm_metrics(processes), media_type=CONTENT_TYPE_LATEST)

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


def vllm_metrics(processes: Sequence[ProcessStatus]) -> bytes:
    """Return vLLM's metrics about requests and speculation, summed over the orchestrators.

    Args:
        processes: The processes of the cluster; those that are no orchestrators do not count.

    Returns:
        Prometheus's text format.
    """
    registry = CollectorRegistry()
    registry.register(_VllmCollector([process for process in processes if process.role == "orchestrator"]))
    return generate_latest(registry)


class _VllmCollector:
    """Makes prometheus_client's families of the states of orchestrators."""

    def __init__(self, orchestrators: Sequence[ProcessStatus]) -> None:
        self._orchestrators = orchestrators

    def collect(self) -> Iterator[Metric]:
        orchestrators = self._orchestrators
        totals = [process.speculation_totals or SpeculationTotals() for process in orchestrators]
        labels = {
            "model_name": next((process.model for process in orchestrators), ""),
            "engine": _ENGINE,
        }
        gauges = (
            ("num_requests_running", "Requests that run.", [p.sessions for p in orchestrators]),
            (
                "num_requests_waiting",
                "Requests that wait for a place.",
                [p.num_queued for p in orchestrators],
            ),
        )
        for name, meaning, values in gauges:
            gauge = GaugeMetricFamily(f"vllm:{name}", meaning, labels=list(labels))
            gauge.add_metric(list(labels.values()), sum(values))
            yield gauge
        counters = (
            ("generation_tokens", "Tokens emitted.", [own.emitted_tokens for own in totals]),
            ("spec_decode_num_drafts", "Proposals with at least one token.", [own.drafts for own in totals]),
            ("spec_decode_num_draft_tokens", "Tokens proposed.", [own.draft_tokens for own in totals]),
            (
                "spec_decode_num_accepted_tokens",
                "Proposed tokens that were accepted and emitted.",
                [own.accepted_tokens for own in totals],
            ),
        )
        for name, meaning, values in counters:
            counter = CounterMetricFamily(f"vllm:{name}", meaning, labels=list(labels))
            counter.add_metric(list(labels.values()), sum(values))
            yield counter
        yield self._per_position(labels)

    def _per_position(self, labels: dict[str, str]) -> Metric:
        counts = [process.accepted_per_position for process in self._orchestrators]
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their depth in the proposal, from 0.",
            labels=[*labels, "position"],
        )
        for position in range(max(map(len, counts), default=0)):
            total = sum(own[position] for own in counts if position < len(own))
            family.add_metric([*labels.values(), str(position)], total)
        return family
