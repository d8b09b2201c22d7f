"""What is one of a few: verification methods, origins of tokens, reasons to end, drafters."""

from __future__ import annotations

from enum import Enum

__all__ = ["DrafterKind", "FinishReason", "TokenOrigin", "VerificationMethod"]


class VerificationMethod(str, Enum):
    """How the target decides which proposed tokens stand; all are lossless."""

    COUPLED = "coupled"
    REJECTION = "rejection"
    NAIVE = "naive"


class TokenOrigin(str, Enum):
    """Where an emitted token came from."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"


class FinishReason(str, Enum):
    """Why a generation ended; the values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class DrafterKind(str, Enum):
    """Which drafter may propose: the rung of the ladder model, ngram, none on which a request starts."""

    MODEL = "model"
    NGRAM = "ngram"
    NONE = "none"
