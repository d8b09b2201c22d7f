"""Enum members and wire values: tables in both directions, and conversions that check a received value."""

from __future__ import annotations

from typing import Final

from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import DrafterKind, FinishReason, TokenOrigin, VerificationMethod
from gammaray.v1 import types_pb2 as pb

METHODS: Final = {
    VerificationMethod.COUPLED: pb.VERIFICATION_METHOD_COUPLED,
    VerificationMethod.REJECTION: pb.VERIFICATION_METHOD_REJECTION,
    VerificationMethod.NAIVE: pb.VERIFICATION_METHOD_NAIVE,
    VerificationMethod.BLOCK: pb.VERIFICATION_METHOD_BLOCK,
}
ORIGINS: Final = {
    TokenOrigin.ACCEPTED: pb.TOKEN_ORIGIN_ACCEPTED,
    TokenOrigin.CORRECTION: pb.TOKEN_ORIGIN_CORRECTION,
    TokenOrigin.BONUS: pb.TOKEN_ORIGIN_BONUS,
}
FINISH_REASONS: Final = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
}
DRAFTERS: Final = {
    DrafterKind.MODEL: pb.DRAFTER_KIND_MODEL,
    DrafterKind.HEAD: pb.DRAFTER_KIND_HEAD,
    DrafterKind.SUFFIX: pb.DRAFTER_KIND_SUFFIX,
    DrafterKind.PREDICTION: pb.DRAFTER_KIND_PREDICTION,
    DrafterKind.GRAMMAR: pb.DRAFTER_KIND_GRAMMAR,
    DrafterKind.NONE: pb.DRAFTER_KIND_NONE,
}
METHODS_BACK: Final = {value: method for method, value in METHODS.items()}
ORIGINS_BACK: Final = {value: origin for origin, value in ORIGINS.items()}
FINISH_REASONS_BACK: Final = {value: reason for reason, value in FINISH_REASONS.items()}
DRAFTERS_BACK: Final = {value: kind for kind, value in DRAFTERS.items()}


def method_from_proto(value: int) -> VerificationMethod:
    """Return the verification method of a wire value; UNSPECIFIED is the default.

    Raises:
        InvalidArgumentError: The value is unknown to this version.
    """
    if value == pb.VERIFICATION_METHOD_UNSPECIFIED:
        return VerificationMethod.COUPLED
    if value not in METHODS_BACK:
        raise InvalidArgumentError("verification", value, f"one of {sorted(METHODS_BACK)}")
    return METHODS_BACK[pb.VerificationMethod.ValueType(value)]


def origin_from_proto(value: pb.TokenOrigin.ValueType) -> TokenOrigin:
    """Return the token origin of a wire value.

    Raises:
        InternalError: The origin is missing, or unknown to this version.
    """
    if value not in ORIGINS_BACK:
        raise InternalError(f"the peer sent token origin {value}, allowed: {sorted(ORIGINS_BACK)}")
    return ORIGINS_BACK[value]
