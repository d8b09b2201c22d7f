"""Features of one session on their way from its target to its draft worker, as bytes that nobody here reads.

They are a cache: what is dropped here costs the draft worker's head some context, or one proposal.
"""

from __future__ import annotations

from gammaray.blocks import MAX_FEATURE_BYTES, MAX_FEATURES, Features

__all__ = ["FeatureRelay"]


class FeatureRelay:
    """Keeps the features that the draft worker in use has not acknowledged, up to a bound.

    Attributes:
        head: Fingerprint of the draft worker's head; empty while no head wants features.
        end: Position after the last one that came: the next ones are asked from here on.
        num_received: Bytes that came from target workers.
        num_sent: Bytes that went to draft workers.
    """

    def __init__(self) -> None:
        self.head = ""
        self.end = 0
        self.num_received = self.num_sent = 0
        self._waiting: list[Features] = []

    def serve(self, head: str) -> None:
        """Keep features for a head from now on, "" for none; those of another one are dropped."""
        if head != self.head:
            self.head, self.end = head, 0
            self._waiting.clear()

    def take(self, features: Features) -> None:
        """Keep features of checked sizes that came from a target worker; after a gap only these."""
        self.num_received += features.num_bytes
        features = features.after(self.end)
        if not features.count:
            return
        waiting = self._waiting
        if waiting and (features.start != self.end or features.width != waiting[0].width):
            waiting.clear()
        waiting.append(features)
        self.end = features.end
        most = min(MAX_FEATURES, MAX_FEATURE_BYTES // (features.width + 4))
        if self.count > most:
            waiting[:] = [Features.joined(waiting).after(self.end - most)]

    @property
    def count(self) -> int:
        """Number of positions whose features wait."""
        return self.end - self._waiting[0].start if self._waiting else 0

    def waiting(self) -> Features | None:
        """Return what waits to be sent; None if nothing does."""
        if not self._waiting:
            return None
        self._waiting[:] = [Features.joined(self._waiting)]
        return self._waiting[0]

    def delivered(self, end: int) -> None:
        """Drop the features of the positions before `end`, which the draft worker has."""
        features = self.waiting()
        if features is not None:
            rest = features.after(end)
            self._waiting[:] = [rest] if rest.count else []

    def drop(self) -> None:
        """Drop what waits: the draft worker refuses it."""
        self._waiting.clear()
