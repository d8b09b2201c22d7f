"""State that the owner of a session passes to the next owner, so that a takeover does not start cold."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from gammaray.maths.acceptance import SpeculationCounters

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SessionHandover:
    """Hints for the next owner: without them the tokens are the same, and generation is slower at first.

    The workers' addresses save the prefill of all tokens (docs/lab.md).
    """

    # Of the turn so far; the last few cycles before the takeover may be missing.
    counters: SpeculationCounters = field(default_factory=SpeculationCounters)
    elapsed_s: float = 0.0  # seconds since the turn's first cycle, without takeovers
    target: str = ""  # host:port of the target worker that holds the session's cache
    draft: str = ""  # host:port of the draft worker that holds the session's cache

    def to_bytes(self) -> bytes:
        return _ADAPTER.dump_json(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionHandover:
        """Parse a stored handover; return an empty one if it is absent or malformed."""
        try:
            return _ADAPTER.validate_json(data or b"{}")
        except ValidationError as error:
            found = error.errors(include_url=False)
            _log.warning("what the former owner of a session left cannot be read: %s", found)
            return cls()


_ADAPTER = TypeAdapter(SessionHandover)
