"""Make docs/metrics.md of `gammaray.telemetry.catalog` and metric_queries.json, and the rules of alerts.

python docs/make_metrics.py            # write
python docs/make_metrics.py --check    # exit with 1 when a page is not what would be written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from gammaray.config import METRICS_PORT
from gammaray.telemetry.catalog import GROUPS, Metric

HERE = Path(__file__).parent
QUERIES = json.loads((HERE / "metric_queries.json").read_text())
"""By metric: an example of a PromQL query, and what its result means."""

ALERTS = HERE.parent / "helm" / "gammaray" / "files" / "alerts.yaml"

_INTRODUCTION = f"""\
# Metrics

Made of [catalog.py](../gammaray/telemetry/catalog.py) and [metric_queries.json](metric_queries.json) by
`python docs/make_metrics.py`; do not edit.

Every process (orchestrators, draft and target workers) serves its metrics to Prometheus at `/metrics` on an
address of its own, by the setting `metrics_listen` (`GAMMARAY_METRICS_LISTEN`): by default a free port of the
loopback interface; a range such as `0.0.0.0:{METRICS_PORT}-{METRICS_PORT + 15}` gives each process of a
machine the first free port, empty switches the endpoint off. `gammaray status` lists the addresses, and so
does any orchestrator's `GET /metrics/targets` in the form of Prometheus's HTTP service discovery: one entry
scrapes all of a cluster ([prometheus.yml](prometheus.yml)). The Helm chart has them on port {METRICS_PORT} of
each pod, named `gm-metrics`; `metrics` is Ray's own.

The endpoints ask for no key and speak plain HTTP: leave them on the loopback interface, or keep strangers
away by a network policy. The paths of the API need a key where it does.

An OpenTelemetry collector reads them by its `prometheus` receiver, with `/metrics/targets` as
`http_sd_configs`; gammaray itself pushes no metrics.

Without any of this, `gammaray top` shows a cluster live from its own status RPC (`--once`, `--json`).

The [dashboard](../helm/gammaray/dashboards/gammaray.json) for Grafana is made of the queries below by
`python helm/dashboard.py`, [prometheus-rules.yml](prometheus-rules.yml) of the
[alerts](../helm/gammaray/files/alerts.yaml) that the chart ships.

Counting takes 5 us per cycle in an orchestrator, 1.4 us per step and block in a worker, and a scrape 2 ms
(2026-11-21, one AMD EPYC core of a busy machine, `benchmarks.metrics_cost` at abac27d).

An accepted token after the end of a completion was not emitted and is not counted. So over any set of
completions the counters of tokens are the sums of what the API's own summaries say.

## By vLLM's names

`GET /metrics` of the HTTP API has metrics that clients and dashboards for vLLM read, with vLLM's labels
`model_name` and `engine` (always 0), summed over all orchestrators:

* counters: `vllm:spec_decode_num_drafts_total`, `vllm:spec_decode_num_draft_tokens_total`,
  `vllm:spec_decode_num_accepted_tokens_total`, `vllm:spec_decode_num_accepted_tokens_per_pos_total` (also by
  `position`, from 0), `vllm:generation_tokens_total`;
* gauges: `vllm:num_requests_running`, `vllm:num_requests_waiting`.

It answers 503 while Redis cannot be reached, which knows the other orchestrators. The metrics have vLLM's
definitions, but for accepted tokens after the end of a completion.

## All processes

Every process also has `process_cpu_seconds_total`, `process_resident_memory_bytes` and the other process
metrics of prometheus_client. In the queries `[5m]` is the time to look back on.
"""


def page() -> str:
    """Return docs/metrics.md."""
    parts, families = [_INTRODUCTION], {}
    for title, metrics in GROUPS.items():
        parts.append(f"## {title}\n")
        for metric in metrics:
            parts.append("\n".join(_lines(metric, families.get(metric.buckets))))
            families.setdefault(metric.buckets, metric.family)
    return "\n".join(parts)


def _lines(metric: Metric, same_buckets: str | None) -> Iterator[str]:
    """Yield the lines of a metric, given the family of an earlier one with its buckets."""
    name = f"{metric.family}_total" if metric.kind.value == "counter" else metric.family
    labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
    yield f"### `{name}{labels}`\n"
    processes = ", ".join(role.value for role in metric.roles)
    yield f"{metric.kind.value.capitalize()} (unit `{metric.unit}`, of {processes}). {metric.meaning}"
    if metric.buckets:
        bounds = f"as of `{same_buckets}`" if same_buckets else ", ".join(f"{b:g}" for b in metric.buckets)
        yield f"Buckets: {bounds}."
    example = QUERIES[metric.name]
    yield f"\n{example['answers']}\n"
    yield f"```promql\n{example['query']}\n```\n"


def rules() -> str:
    """Return docs/prometheus-rules.yml."""
    lines = ALERTS.read_text().splitlines()
    body = "\n".join(f"  {line}" if line else "" for line in lines if not line.startswith("#"))
    return (
        "# Made of helm/gammaray/files/alerts.yaml by `python docs/make_metrics.py`; do not edit.\n"
        f"groups:\n{body}\n"
    )


def main() -> int:
    """Write the pages, or compare them; return the exit status."""
    stale = 0
    for name, text in (("metrics.md", page()), ("prometheus-rules.yml", rules())):
        path = HERE / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{name} is stale: run `python docs/make_metrics.py`", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
