"""Ids of spans; needs OpenTelemetry's SDK, which is slow to import."""

from __future__ import annotations

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class SpanIds(RandomIdGenerator):
    """Random ids, unless the `next_id` is given: a block names its parent before that span starts."""

    def __init__(self) -> None:
        self.next_id = 0

    def generate_span_id(self) -> int:
        span_id, self.next_id = self.next_id, 0
        return span_id or super().generate_span_id()
