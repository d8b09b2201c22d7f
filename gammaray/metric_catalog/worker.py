"""What a draft or target worker counts and measures, and what every process tells."""

from __future__ import annotations

from gammaray.metric_catalog.metric import ALL, BOTH_WORKERS, DRAFT, SIZES, TOKEN_S, WAIT_S, Kind, Metric

__all__ = ["ENGINE", "INFO"]

ENGINE = (
    Metric(
        *("gammaray.worker.queue_depth", Kind.GAUGE, "{block}", BOTH_WORKERS),
        "Blocks waiting or running.",
        "avg by (role) (gammaray_worker_queue_depth)",
        "Mean queue depth by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.sessions", Kind.GAUGE, "{session}", BOTH_WORKERS),
        "Sessions with a KV cache.",
        "sum by (role) (gammaray_worker_sessions)",
        "Sessions held by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.cache.used", Kind.GAUGE, "By", BOTH_WORKERS),
        "KV cache in use.",
        "max by (role) (gammaray_worker_cache_used_bytes / gammaray_worker_cache_budget_bytes)",
        "Fullest KV cache by role, as a share of its budget.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.cache.budget", Kind.GAUGE, "By", BOTH_WORKERS),
        "Upper bound of the KV cache.",
        "sum by (role) (gammaray_worker_cache_budget_bytes)",
        "KV cache there is, by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.cache.retained", Kind.GAUGE, "By", BOTH_WORKERS),
        "KV cache that sessions left when they ended, beside what is in use: for others that begin alike, "
        "until somebody needs the room.",
        "sum by (role) (gammaray_worker_cache_retained_bytes)",
        "KV cache retained by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.prefix_cache.queries", Kind.COUNTER, "{token}", BOTH_WORKERS),
        "Tokens that sessions began with on this worker.",
        "sum by (role) (rate(gammaray_worker_prefix_cache_hits_total[5m])) / sum by (role) "
        "(rate(gammaray_worker_prefix_cache_queries_total[5m]))",
        "Share of prompts that need not be read again, by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.prefix_cache.hits", Kind.COUNTER, "{token}", BOTH_WORKERS),
        "Those of them that were cached: by an earlier turn, or by another session that begins alike.",
        "sum by (role) (rate(gammaray_worker_prefix_cache_hits_total[5m]))",
        "Tokens per second that were cached instead of read, by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.cache.evictions", Kind.COUNTER, "{session}", BOTH_WORKERS),
        "Sessions whose cache was evicted; they are fed again.",
        "sum by (role) (rate(gammaray_worker_cache_evictions_total[5m]))",
        "Evictions per second by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.step.duration", Kind.HISTOGRAM, "s", BOTH_WORKERS),
        "Time of one step (forward and what follows from it) over blocks.",
        "avg by (role) (rate(gammaray_worker_step_duration_seconds_sum[5m]))",
        "Occupancy by role: the share of time in which a worker's engine runs.",
        labels=("role",),
        buckets=TOKEN_S,
    ),
    Metric(
        *("gammaray.worker.step.blocks", Kind.HISTOGRAM, "{block}", BOTH_WORKERS),
        "Blocks (sessions) per step: the batch size.",
        "sum by (role) (rate(gammaray_worker_step_blocks_sum[5m])) / sum by (role) "
        "(rate(gammaray_worker_step_blocks_count[5m]))",
        "Mean batch size by role.",
        labels=("role",),
        buckets=SIZES,
    ),
    Metric(
        *("gammaray.worker.step.tokens", Kind.COUNTER, "{token}", BOTH_WORKERS),
        "Tokens fed over all steps.",
        "sum by (role) (rate(gammaray_worker_step_tokens_total[5m]))",
        "Tokens fed per second by role.",
        labels=("role",),
    ),
    Metric(
        *("gammaray.worker.queue.time", Kind.HISTOGRAM, "s", BOTH_WORKERS),
        "Time that a block waited before its first step.",
        "histogram_quantile(0.95, sum by (role, le) (rate(gammaray_worker_queue_time_seconds_bucket[5m])))",
        "95th percentile of the wait by role.",
        labels=("role",),
        buckets=WAIT_S,
    ),
    Metric(
        *("gammaray.worker.blocks", Kind.COUNTER, "{block}", BOTH_WORKERS),
        "Blocks answered, by outcome: done, need (committed tokens that lack) or error.",
        'sum by (role) (rate(gammaray_worker_blocks_total{outcome="error"}[5m])) / sum by (role) '
        "(rate(gammaray_worker_blocks_total[5m]))",
        "Share of blocks that failed, by role.",
        labels=("role", "outcome"),
    ),
    Metric(
        *("gammaray.draft_ahead.lookups", Kind.COUNTER, "{proposal}", DRAFT),
        "Proposals asked for after another one of the session, which draft-ahead could have prepared.",
        "sum(rate(gammaray_draft_ahead_hits_total[5m])) / sum(rate(gammaray_draft_ahead_lookups_total[5m]))",
        "Draft-ahead hit rate.",
    ),
    Metric(
        *("gammaray.draft_ahead.hits", Kind.COUNTER, "{proposal}", DRAFT),
        "Those of them that were ready, without a forward.",
        "sum(rate(gammaray_draft_ahead_hits_total[5m]))",
        "Prepared proposals used per second.",
    ),
    Metric(
        *("gammaray.draft_ahead.rows", Kind.COUNTER, "{token}", DRAFT),
        "Tokens fed in draft-ahead's own forwards, by use: whether they became part of a proposal or of "
        "the text.",
        'sum(rate(gammaray_draft_ahead_rows_total{use="wasted"}[5m])) / '
        "sum(rate(gammaray_draft_ahead_rows_total[5m]))",
        "Share of the work ahead that was of no use.",
        labels=("use",),
    ),
)

INFO = (
    Metric(
        *("gammaray.info", Kind.GAUGE, "1", ALL),
        "Always 1; tells what a process is by its labels.",
        "count by (role, version) (gammaray_info)",
        "Processes by role and version.",
        labels=("role", "model", "version"),
    ),
    Metric(
        *("gammaray.tasks", Kind.GAUGE, "{task}", ALL),
        "asyncio tasks that are not done: some of the process's own, and some per request and stream.",
        "max by (role) (gammaray_tasks)",
        "Most tasks in a process by role: at rest it always comes back to the same few.",
        labels=("role",),
    ),
)
