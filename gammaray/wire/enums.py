"""Enum members and wire values: tables in both directions, and conversions that check a received value."""

from __future__ import annotations

from typing import Final

from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import DrafterKind, FinishReason, TokenOrigin, VerificationMethod
from gammaray.v1 import types_pb2 as pb

METHODS: Final = {
    method: pb.VerificationMethod.Value(f"VERIFICATION_METHOD_{method.name}") for method in VerificationMethod
}
ORIGINS: Final = {origin: pb.TokenOrigin.Value(f"TOKEN_ORIGIN_{origin.name}") for origin in TokenOrigin}
FINISH_REASONS: Final = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
DRAFTERS: Final = {kind: pb.DrafterKind.Value(f"DRAFTER_KIND_{kind.name}") for kind in DrafterKind}
METHODS_BACK: Final = {value: method for method, value in METHODS.items()}
ORIGINS_BACK: Final = {value: origin for origin, value in ORIGINS.items()}
FINISH_REASONS_BACK: Final = {value: reason for reason, value in FINISH_REASONS.items()}
DRAFTERS_BACK: Final = {value: kind for kind, value in DRAFTERS.items()}


def method_from_proto(value: int) -> VerificationMethod:
    """Return the verification method of a wire value; UNSPECIFIED is the default."""
    if value == pb.VERIFICATION_METHOD_UNSPECIFIED:
        return VerificationMethod.COUPLED
    if value not in METHODS_BACK:
        raise InvalidArgumentError("verification", value, f"one of {sorted(METHODS_BACK)}")
    return METHODS_BACK[pb.VerificationMethod.ValueType(value)]


def origin_from_proto(value: pb.TokenOrigin.ValueType) -> TokenOrigin:
    """Return the token origin of a wire value; InternalError if it is missing or unknown to this version."""
    if value not in ORIGINS_BACK:
        raise InternalError(f"the peer sent token origin {value}, allowed: {sorted(ORIGINS_BACK)}")
    return ORIGINS_BACK[value]
