"""State that the owner of a session passes to the next owner, so that a takeover does not start cold."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, fields
from typing import Any

from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import DrafterKind

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
        counters = vars(self.counters) | {
            "cycles_by_drafter": {k.value: count for k, count in self.counters.cycles_by_drafter.items()},
            "draft_workers": sorted(self.counters.draft_workers),
        }
        body = {"counters": counters, "elapsed_s": self.elapsed_s, "target": self.target, "draft": self.draft}
        return json.dumps(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SessionHandover:
        """Parse a stored handover; return an empty one if it is absent or malformed."""
        if not data:
            return cls()
        try:
            body = json.loads(data)
            return cls(
                _counters(body["counters"]), float(body["elapsed_s"]), str(body["target"]), str(body["draft"])
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("what the former owner of a session left cannot be read: %r", error)
            return cls()


def _counters(body: dict[str, Any]) -> SpeculationCounters:
    known = {field.name for field in fields(SpeculationCounters)}
    given = {name: value for name, value in body.items() if name in known}
    given["cycles_by_drafter"] = dict.fromkeys(DrafterKind, 0) | {
        DrafterKind(name): int(count) for name, count in given["cycles_by_drafter"].items()
    }
    given["draft_workers"] = set(given["draft_workers"])
    return SpeculationCounters(**given)
