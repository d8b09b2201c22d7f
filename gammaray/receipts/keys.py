"""Keys that sign receipts: Ed25519 (RFC 8032), in a file that is a JSON Web Key Set (RFC 7517, RFC 8037).

The newest key signs, and only it has its private part `d`. The public parts of former keys stay in the file,
so that their receipts can be checked. An id is the key's thumbprint (RFC 7638).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.security.keys import locked, read_bounded, replace_file

_FIELD = "receipt_keys_file"
_Bytes32 = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{43}$")]


class ReceiptKey(BaseModel):
    """A key, as a JSON Web Key."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kty: Literal["OKP"] = "OKP"
    crv: Literal["Ed25519"] = "Ed25519"
    kid: str
    x: _Bytes32  # public key, 32 bytes in base64url
    d: _Bytes32 | None = Field(None, repr=False)  # private key; None for a former or published one

    @property
    def public(self) -> ReceiptKey:
        """The key without its private part."""
        return self.model_copy(update={"d": None})

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes; the key must have its private part."""
        assert self.d is not None
        signature: bytes = _ed25519().Ed25519PrivateKey.from_private_bytes(unb64(self.d)).sign(message)
        return signature

    def has_signed(self, signature: bytes, message: bytes) -> bool:
        """Whether a signature of a message was made with the private part of this key."""
        public = _ed25519().Ed25519PublicKey.from_public_bytes(unb64(self.x))
        from cryptography.exceptions import InvalidSignature

        try:
            public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class KeySet(BaseModel):
    """A JSON Web Key Set."""

    model_config = ConfigDict(frozen=True)

    keys: tuple[ReceiptKey, ...]  # former ones first
    dtypes: tuple[str, ...] = ()  # of the arithmetic of the publisher's targets; empty: not known


def parse_keys(text: bytes, where: str, field: str = "key") -> KeySet:
    """Return a JSON Web Key Set; InvalidArgumentError names the wrong field and place, never the content."""
    try:
        return KeySet.model_validate_json(text)
    except ValidationError as error:
        place = ".".join(map(str, error.errors(include_input=False)[0]["loc"])) or "the top level"
        allowed = "a set of Ed25519 keys as of `gammaray keys receipts` or GET /v1/receipts/key"
        raise InvalidArgumentError(field, f"{where}, invalid at {place}", allowed) from None


def read_receipt_keys(path: Path) -> tuple[ReceiptKey, ...]:
    """Return the keys of a file, former ones first; InvalidArgumentError if the last one cannot sign."""
    allowed = "a file made by `gammaray keys receipts`"
    keys = parse_keys(read_bounded(path, _FIELD, allowed), str(path), _FIELD).keys
    if not keys or keys[-1].d is None:
        raise InvalidArgumentError(_FIELD, f"{path} without a private key at its end", allowed)
    return keys


def rotate(path: Path) -> tuple[ReceiptKey, ...]:
    """Add a key to a file, made if missing; former keys lose their private part. Return the public parts.

    InvalidArgumentError if the file cannot be used, FailedPreconditionError without the package cryptography.
    """
    private = _ed25519().Ed25519PrivateKey.generate()
    x = b64(private.public_key().public_bytes_raw())
    thumbprint = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": x}, separators=(",", ":"))
    key = ReceiptKey(
        kid=b64(hashlib.sha256(thumbprint.encode()).digest()), x=x, d=b64(private.private_bytes_raw())
    )
    with locked(path, _FIELD):
        former = [one.public for one in read_receipt_keys(path)] if path.exists() else []
        text = json.dumps({"keys": [one.model_dump(exclude_none=True) for one in (*former, key)]}, indent=2)
        replace_file(path, text + "\n", _FIELD)
    return *former, key.public


def published(keys: Sequence[ReceiptKey], dtypes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON Web Key Set of the public parts of keys, and dtypes (see `KeySet`) if known."""
    found = {"keys": [key.public.model_dump(exclude_none=True) for key in keys]}
    return {**found, "dtypes": [*dtypes]} if dtypes else found


def b64(data: bytes) -> str:
    """Return bytes in base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unb64(text: str) -> bytes:
    """Return the bytes of canonical base64url without padding; ValueError for any other text."""
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if b64(data) != text:
        raise ValueError(f"got {text[:20]!r}, allowed: base64url without padding")
    return data


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise FailedPreconditionError(
            "receipts need the package cryptography: pip install 'gammaray[orchestrator]'"
        ) from None
    return ed25519
