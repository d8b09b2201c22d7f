"""What an orchestrator counts and measures."""

from __future__ import annotations

from gammaray.metric_catalog.metric import GAMMAS, ORCHESTRATOR, REQUEST_S, TOKEN_S, Kind, Metric

__all__ = ["REQUESTS", "SPECULATION", "TIME", "WORKERS"]

SPECULATION = (
    Metric(
        *("gammaray.spec_decode.num_drafts", Kind.COUNTER, "{draft}", ORCHESTRATOR),
        "Proposals with at least one token (vLLM's definition).",
        "1 + sum(rate(gammaray_spec_decode_num_accepted_tokens_total[5m])) / "
        "sum(rate(gammaray_spec_decode_num_drafts_total[5m]))",
        "Mean acceptance length, bonus included (vLLM's definition).",
    ),
    Metric(
        *("gammaray.spec_decode.num_draft_tokens", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Tokens proposed, all nodes of trees included (vLLM's definition).",
        "sum(rate(gammaray_spec_decode_num_accepted_tokens_total[5m])) / "
        "sum(rate(gammaray_spec_decode_num_draft_tokens_total[5m]))",
        "Acceptance rate: the share of the draft's work that was of use.",
    ),
    Metric(
        *("gammaray.spec_decode.num_tested_tokens", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Proposed tokens put to the test: the accepted ones, plus one where a test failed.",
        "sum(rate(gammaray_spec_decode_num_accepted_tokens_total[5m])) / "
        "sum(rate(gammaray_spec_decode_num_tested_tokens_total[5m]))",
        "Alpha.",
    ),
    Metric(
        *("gammaray.spec_decode.num_accepted_tokens", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Proposed tokens that were accepted and emitted.",
        "sum(rate(gammaray_spec_decode_num_accepted_tokens_total[5m]))",
        "Accepted tokens per second.",
    ),
    Metric(
        *("gammaray.spec_decode.num_accepted_tokens_per_pos", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Accepted tokens by their depth in the proposal, from 0 (vLLM's definition).",
        "sum by (position) (rate(gammaray_spec_decode_num_accepted_tokens_per_pos_total[5m])) / "
        "scalar(sum(rate(gammaray_spec_decode_num_drafts_total[5m])))",
        "Share of proposals accepted up to each position.",
        labels=("position",),
    ),
    Metric(
        *("gammaray.tokens", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Tokens emitted, by origin: accepted, correction or bonus.",
        "sum(rate(gammaray_tokens_total[5m]))",
        "Goodput: emitted tokens per second, of which none was thrown away.",
        labels=("origin",),
    ),
    Metric(
        *("gammaray.cycles", Kind.COUNTER, "{cycle}", ORCHESTRATOR),
        "Cycles by the rung of the drafter ladder that proposed: model, ngram, or none.",
        "sum(rate(gammaray_tokens_total[5m])) / sum(rate(gammaray_cycles_total[5m]))",
        "Tokens per cycle.",
        labels=("rung",),
    ),
    Metric(
        *("gammaray.cycle.fallbacks", Kind.COUNTER, "{cycle}", ORCHESTRATOR),
        "Cycles below the rung that the request allows: its drafter was absent, failed, late, or still "
        "reading.",
        "sum(rate(gammaray_cycle_fallbacks_total[5m])) / sum(rate(gammaray_cycles_total[5m]))",
        "Share of cycles without the drafter asked for.",
    ),
    Metric(
        *("gammaray.cycle.gamma", Kind.HISTOGRAM, "{token}", ORCHESTRATOR),
        "Gamma that the controller chose, per cycle.",
        "sum(rate(gammaray_cycle_gamma_sum[5m])) / sum(rate(gammaray_cycle_gamma_count[5m]))",
        "Mean gamma.",
        buckets=GAMMAS,
    ),
)

TIME = (
    Metric(
        *("gammaray.cycle.duration", Kind.HISTOGRAM, "s", ORCHESTRATOR),
        "Time of one cycle.",
        "histogram_quantile(0.99, sum by (le) (rate(gammaray_cycle_duration_seconds_bucket[5m])))",
        "99th percentile of a cycle.",
        buckets=TOKEN_S,
    ),
    Metric(
        *("gammaray.cycle.time", Kind.COUNTER, "s", ORCHESTRATOR),
        "Time of all cycles by where it went: draft (waiting for proposals), target_queue and target_step "
        "(what the target worker reports), target_wire (the rest of that wait: network and messages), "
        "other.",
        "sum by (part) (rate(gammaray_cycle_time_seconds_total[5m])) / "
        "scalar(sum(rate(gammaray_cycle_time_seconds_total[5m])))",
        "Time split of a cycle.",
        labels=("part",),
    ),
    Metric(
        *("gammaray.decode.time", Kind.COUNTER, "s", ORCHESTRATOR),
        "Time of the cycles that are compared with plain decoding: all but each completion's first.",
        "sum(rate(gammaray_decode_plain_time_seconds_total[5m])) / "
        "sum(rate(gammaray_decode_time_seconds_total[5m]))",
        "Measured speedup over plain decoding by the same stack (the cost model of plain cycles).",
    ),
    Metric(
        *("gammaray.decode.plain_time", Kind.COUNTER, "s", ORCHESTRATOR),
        "Time that the tokens of those cycles would have taken one by one, by the measured cost of plain "
        "cycles.",
        "sum(rate(gammaray_decode_plain_time_seconds_total[5m])) - "
        "sum(rate(gammaray_decode_time_seconds_total[5m]))",
        "Seconds of decoding saved per second.",
    ),
)

REQUESTS = (
    Metric(
        *("gammaray.requests", Kind.COUNTER, "{request}", ORCHESTRATOR),
        "Requests ended, by outcome: stop, length, cancelled, or the name of the gRPC status of the error.",
        'sum(rate(gammaray_requests_total{outcome=~"internal|unavailable|deadline_exceeded|unknown"}[5m])) / '
        "sum(rate(gammaray_requests_total[5m]))",
        "Error ratio: requests that the cluster failed.",
        labels=("outcome",),
    ),
    Metric(
        *("gammaray.requests.active", Kind.GAUGE, "{request}", ORCHESTRATOR),
        "Requests in flight.",
        "sum(gammaray_requests_active)",
        "Requests in flight.",
    ),
    Metric(
        *("gammaray.requests.waiting", Kind.GAUGE, "{request}", ORCHESTRATOR),
        "Requests that wait for a place.",
        "sum(gammaray_requests_waiting)",
        "Requests that wait for a place: scale orchestrators or targets when it lasts.",
    ),
    Metric(
        *("gammaray.resumes", Kind.COUNTER, "{request}", ORCHESTRATOR),
        "Requests with which a client came back to a session, after its stream broke.",
        "sum(rate(gammaray_resumes_total[5m]))",
        "Resumes per second.",
    ),
    Metric(
        *("gammaray.prompt.tokens", Kind.COUNTER, "{token}", ORCHESTRATOR),
        "Tokens of prompts.",
        "sum(rate(gammaray_prompt_tokens_total[5m]))",
        "Prompt tokens per second.",
    ),
    Metric(
        *("gammaray.client.request.duration", Kind.HISTOGRAM, "s", ORCHESTRATOR),
        "Time of a completion, from the request's arrival to its last chunk.",
        "histogram_quantile(0.5, sum by (le) (rate(gammaray_request_duration_seconds_bucket[5m])))",
        "Median time of a completion.",
        buckets=REQUEST_S,
    ),
    Metric(
        *("gammaray.time_to_first_token", Kind.HISTOGRAM, "s", ORCHESTRATOR),
        "Time from a request's arrival to its first chunk.",
        "histogram_quantile(0.95, sum by (le) (rate(gammaray_time_to_first_token_seconds_bucket[5m])))",
        "95th percentile of the time to first token.",
        buckets=REQUEST_S,
    ),
    Metric(
        *("gammaray.time_per_output_token", Kind.HISTOGRAM, "s", ORCHESTRATOR),
        "Time from the first to the last chunk over the number of tokens behind the first chunk, per "
        "completion.",
        "histogram_quantile(0.5, sum by (le) (rate(gammaray_time_per_output_token_seconds_bucket[5m])))",
        "Median time per output token.",
        buckets=TOKEN_S,
    ),
    Metric(
        *("gammaray.inter_token_latency", Kind.HISTOGRAM, "s", ORCHESTRATOR),
        "Gap between two chunks of a completion, of one or more tokens each (vLLM's definition).",
        "histogram_quantile(0.99, sum by (le) (rate(gammaray_inter_token_latency_seconds_bucket[5m])))",
        "99th percentile of the gap between chunks.",
        buckets=TOKEN_S,
    ),
)

WORKERS = (
    Metric(
        *("gammaray.wire", Kind.COUNTER, "By", ORCHESTRATOR),
        "Bytes of frames to (sent) and from (received) workers, by worker role and direction.",
        "sum by (role) (rate(gammaray_wire_bytes_total[5m])) / scalar(sum(rate(gammaray_cycles_total[5m])))",
        "Bytes on the wire per cycle, by role.",
        labels=("role", "direction"),
    ),
    Metric(
        *("gammaray.workers", Kind.GAUGE, "{worker}", ORCHESTRATOR),
        "Workers that the orchestrator is connected to, by role.",
        "min by (role) (gammaray_workers)",
        "Connected workers, as the orchestrator with the fewest sees them.",
        labels=("role",),
    ),
)
