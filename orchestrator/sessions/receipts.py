"""Signs receipts of turns (`gammaray.receipts`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gammaray.errors import InvalidArgumentError
from gammaray.grammar.matcher import grammar_identity
from gammaray.receipts.keys import ReceiptKey, published, read_receipt_keys
from gammaray.receipts.receipt import Receipt, dtype_of
from gammaray.types import Chunk
from orchestrator.access.reloaded import ReloadedKeys
from orchestrator.sessions.lifecycle import OpenSession
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread
from orchestrator.text.tokenizer import Tokenizer


class ReceiptIssuer:
    """Signs receipts by the newest key of a file, if one is named; InvalidArgumentError if that has none."""

    def __init__(
        self,
        keys_file: str,
        tokenizer: Tokenizer,
        model_name: str,
        identities: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._keys = (
            ReloadedKeys(Path(keys_file), read_receipt_keys, "keys of receipts") if keys_file else None
        )
        self._tokenizer, self._model_name, self._identities = tokenizer, model_name, identities

    @property
    def keys(self) -> Sequence[ReceiptKey]:
        """The keys, former ones first."""
        return () if self._keys is None else self._keys.current()

    def published(self) -> dict[str, Any]:
        """Return the JSON Web Key Set of the public keys, with the dtypes of the targets' arithmetic."""
        return published(self.keys, sorted({dtype_of(identity) for identity in self._identities()} - {""}))

    def check(self) -> None:
        """Raise InvalidArgumentError if there is no key."""
        if not self.keys:
            allowed = "false: this server has no key for receipts (receipt_keys_file)"
            raise InvalidArgumentError("receipt", "true", allowed)

    async def issue(self, opened: OpenSession, last: Chunk) -> str:
        """Return the signed receipt of a turn, with the tokens of all owners; raises as `check` does."""
        self.check()
        if last.prompt_tokens + last.offset + len(last.tokens) <= INLINE_NUMBERS:
            return self._signed(opened, last)
        return await in_thread(self._signed, opened, last)

    def _signed(self, opened: OpenSession, last: Chunk) -> str:
        session, request = opened.session, opened.request
        start = len(session.prompt)
        receipt = Receipt.model_validate(
            {
                "issued_at": int(time.time()),
                "model": request.model or self._model_name,
                "model_identity": session.model_identity,
                "tokenizer": self._tokenizer.vocab_sha256,
                "eos_token_ids": sorted(self._tokenizer.eos_token_ids),
                "grammars": grammar_identity() if session.params.grammar else "",
                "verification": session.method,
                "prompt_token_ids": session.prompt,
                # Of a cancelled turn, the last tokens may not have been stored nor sent.
                "token_ids": session.token_ids[start : start + last.offset + len(last.tokens)],
                "sampling": vars(session.params),
                "max_tokens": session.max_tokens,
                "stop": request.stop,
                "stop_token_ids": request.stop_token_ids,
                "ignore_eos": request.ignore_eos,
                "finish_reason": last.finish_reason,
            }
        )
        return receipt.signed(self.keys[-1])
