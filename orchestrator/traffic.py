"""Bytes on the wire between an orchestrator and the workers of one role."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass
class Traffic:
    """Bytes of frames so far, without what HTTP/2 adds.

    Attributes:
        sent: To the workers.
        received: From them.
    """

    sent: int = 0
    received: int = 0
