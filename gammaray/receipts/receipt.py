"""Receipts: what a server signs about a completion, so that anyone with the checkpoint can check its tokens.

With coupled verification each token is argmax(log p + noise), where the noise is a function of seed and
position (arXiv 2408.07978), and p one of checkpoint, prompt and parameters. A receipt names all of these.

Its text is a JSON Web Signature in the compact form (RFC 7515) with EdDSA (RFC 8037): header, payload and
signature in base64url. What is signed are the bytes of header and payload as they are, so that no client has
to write JSON as the server does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gammaray.errors import InvalidArgumentError
from gammaray.receipts.keys import ReceiptKey, b64, unb64
from gammaray.types import FinishReason, SamplingParams, VerificationMethod

VERSION = 1
_TYPE = "gammaray-receipt"
_ALLOWED = "a receipt, as a server returned it: three parts of base64url with dots between"


def dtype_of(model_identity: str) -> str:
    """Return the dtype that a model's identity names; empty if it names none."""
    return model_identity.partition("/")[2].partition("/")[0]


class Receipt(BaseModel):
    """What a receipt says about the turn of a session."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    version: Literal[1] = 1  # of this form
    issued_at: int  # Unix time in seconds at which it was signed
    model: str  # name of the model, or of a LoRA adapter, that the client used
    model_identity: str  # of weights and arithmetic, see `services.process.fingerprints`
    tokenizer: str  # SHA-256 of the tokenizer's vocabulary
    eos_token_ids: tuple[int, ...]  # tokens that end a completion, unless `ignore_eos`
    grammars: str = ""  # the grammar library and its version; empty without a grammar
    verification: VerificationMethod
    prompt_token_ids: tuple[int, ...]  # the prompt, earlier turns included
    sampling: SamplingParams  # with the seed in use, and the grammar that a JSON schema became
    max_tokens: int  # upper bound of emitted tokens, clipped to the context
    stop: tuple[str, ...] = ()  # the texts before which the completion ends
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end it
    ignore_eos: bool = False  # whether it continues after end-of-sequence tokens
    token_ids: tuple[int, ...]
    finish_reason: FinishReason

    @property
    def dtype(self) -> str:
        """The dtype of the target's arithmetic, as the signer names it; empty if it names none."""
        return dtype_of(self.model_identity)

    def signed(self, key: ReceiptKey) -> str:
        """Return the receipt's text, signed with the private part of a key."""
        header = json.dumps({"alg": "EdDSA", "kid": key.kid, "typ": _TYPE}, separators=(",", ":"))
        message = f"{b64(header.encode())}.{b64(self.model_dump_json().encode())}"
        return f"{message}.{b64(key.sign(message.encode()))}"


@dataclass(frozen=True)
class SignedReceipt:
    """A receipt, the id of the key that its header names, the signed bytes, and the signature."""

    receipt: Receipt
    kid: str
    message: bytes
    signature: bytes

    @classmethod
    def parse(cls, text: str) -> SignedReceipt:
        """Return the receipt of a text, with its signature unchecked; InvalidArgumentError if it is none."""
        head, _, rest = text.partition(".")
        body, _, signature = rest.partition(".")
        try:
            header, payload, signed = json.loads(unb64(head)), unb64(body), unb64(signature)
            is_ours = header["alg"] == "EdDSA" and header["typ"] == _TYPE
            kid, version = str(header["kid"]), json.loads(payload)["version"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InvalidArgumentError("receipt", f"{text[:40]!r}, cut or changed", _ALLOWED) from None
        if not is_ours or len(signed) != 64:
            raise InvalidArgumentError("receipt", "a signature of another form, or cut", _ALLOWED)
        if version != VERSION:
            raise InvalidArgumentError("receipt.version", version, f"{VERSION}; other versions check others")
        try:
            receipt = Receipt.model_validate_json(payload)
            receipt.sampling.validate()
        except ValidationError as error:
            field = ".".join(map(str, error.errors(include_input=False)[0]["loc"]))
            raise InvalidArgumentError("receipt", f"a payload invalid at {field}", _ALLOWED) from None
        if receipt.model_dump_json().encode() != payload:
            raise InvalidArgumentError("receipt", "a payload that a server does not write", _ALLOWED)
        return cls(receipt, kid, f"{head}.{body}".encode(), signed)

    def check(self, keys: Sequence[ReceiptKey]) -> None:
        """Raise InvalidArgumentError unless the key with the receipt's id made the signature."""
        key = next((key for key in keys if key.kid == self.kid), None)
        if key is None:
            raise InvalidArgumentError("receipt.kid", self.kid, f"one of {[key.kid for key in keys]}")
        if not key.has_signed(self.signature, self.message):
            raise InvalidArgumentError("receipt.signature", "a bad signature", f"that of key {self.kid}")
