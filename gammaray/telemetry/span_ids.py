"""Ids of spans; needs OpenTelemetry's SDK, which is slow to import."""

from __future__ import annotations

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class SpanIds(RandomIdGenerator):
    """Random ids, unless the id of the next span is given: a block names its parent before that span starts.

    Attributes:
        next_id: Id of the next span to start; 0 for a random one.
    """

    def __init__(self) -> None:
        self.next_id = 0

    def generate_span_id(self) -> int:
        span_id, self.next_id = self.next_id, 0
        return span_id or super().generate_span_id()
