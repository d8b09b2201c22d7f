"""Lossless speculative decoding as a cluster: the client, its types and its errors.

Names are imported when they are first used, so that `import gammaray` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gammaray.client.async_client import AsyncClient
    from gammaray.client.completion import Completion
    from gammaray.client.request import GenerateOptions
    from gammaray.client.sync_client import Client
    from gammaray.client.transport import RetryPolicy
    from gammaray.errors import (
        CancelledError,
        DeadlineExceededError,
        FailedPreconditionError,
        GammarayError,
        IncompleteOutputError,
        InternalError,
        InvalidArgumentError,
        ModelChangedError,
        NotFoundError,
        ResourceExhaustedError,
        UnauthenticatedError,
        UnavailableError,
    )
    from gammaray.types import (
        ADAPTIVE,
        Chunk,
        DrafterKind,
        EmittedToken,
        FinishReason,
        GammaPolicy,
        GenerationRequest,
        ProcessStatus,
        PromptLogprobs,
        SamplingParams,
        SpeculationSummary,
        TokenOrigin,
        TopLogprob,
        Usage,
        VerificationMethod,
    )
    from gammaray.wire.sessions import SessionInfo, SessionState

__all__ = [
    "ADAPTIVE",
    "AsyncClient",
    "CancelledError",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "DrafterKind",
    "EmittedToken",
    "FailedPreconditionError",
    "FinishReason",
    "GammaPolicy",
    "GammarayError",
    "GenerateOptions",
    "GenerationRequest",
    "IncompleteOutputError",
    "InternalError",
    "InvalidArgumentError",
    "ModelChangedError",
    "NotFoundError",
    "ProcessStatus",
    "PromptLogprobs",
    "ResourceExhaustedError",
    "RetryPolicy",
    "SamplingParams",
    "SessionInfo",
    "SessionState",
    "SpeculationSummary",
    "TokenOrigin",
    "TopLogprob",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
    "VerificationMethod",
    "__version__",
]

__version__ = "0.1.0"

# Searched in this order, so that few modules are imported for most names.
_HOMES = (
    "errors",
    "types",
    "client.completion",
    "client.request",
    "wire.sessions",
    "client.transport",
    "client.async_client",
    "client.sync_client",
)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for home in _HOMES:
        module = import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            value: object = getattr(module, name)
            globals()[name] = value
            return value
    raise AssertionError(f"{name} is public and has no home")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
