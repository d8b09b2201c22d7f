"""Errors of the engine, on top of gammaray's."""

from __future__ import annotations

from gammaray.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError, rendering

_MOST_RENDERED = 120
"""Characters of a value in an error."""


class UnsupportedModelError(FailedPreconditionError):
    """The model, or GGUF file, cannot be served exactly; `reason` is one sentence for the operator."""

    def __init__(self, model: str, reason: str) -> None:
        self.model, self.reason = model, " ".join(reason.split())  # one line, whatever a library wrote
        super().__init__(f"{model} cannot be served: {self.reason}")


class InvalidModelError(UnsupportedModelError):
    """A file of a model, draft or head contradicts itself, or has a value that no model can have.

    Attributes:
        field: The key of a configuration, or the tensor.
        got: Short rendering of the value.
        allowed: Description of the allowed values.
    """

    def __init__(self, model: str, file: str, field: str, got: object, allowed: str) -> None:
        rendered = got if isinstance(got, str) else rendering(got)
        self.file, self.field, self.got, self.allowed = file, field, rendered[:_MOST_RENDERED], allowed
        super().__init__(model, f"{file}: {field}: got {self.got}, allowed: {allowed}")


class EndedEarlyError(Exception):
    """A forward was ended, as its result is no longer needed."""


class CacheGapError(FailedPreconditionError):
    """A feed starts past the `length` cached tokens of a session (0 if unknown), which come first."""

    def __init__(self, session_id: str, length: int) -> None:
        super().__init__(f"session {session_id!r} has {length} cached tokens, the feed starts after them")


class CacheFullError(ResourceExhaustedError):
    """One step alone needs more cache than the whole budget."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        super().__init__(f"the step needs {needed_bytes} bytes of cache, the budget is {budget_bytes}")


class EngineLostError(UnavailableError):
    """A part of the engine has failed permanently; its worker must be restarted."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine is lost: {reason}")
