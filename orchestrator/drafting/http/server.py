"""A server that drafts, as the sessions of a replica share it: what it is, its health and its failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gammaray.aio import end_tasks
from gammaray.draft_server import DraftServerUrl
from gammaray.errors import InvalidArgumentError
from gammaray.types import ProcessStatus
from gammaray.vocabulary import Vocabulary
from orchestrator.drafting.http.client import DraftClient, DraftServerError, Failure
from orchestrator.drafting.http.dialects import Ask, Dialect, Reply, dialect_of
from orchestrator.text.cpu_threads import in_thread
from orchestrator.workers.backoff import Backoff, Patience

__all__ = ["DraftServer", "Identity", "TargetTokenizer", "identify"]

_log = logging.getLogger(__name__)

WATCH_S = 2.0
"""Seconds between two checks that the server answers."""

RECONNECT_BASE_S, RECONNECT_CAP_S = 0.25, 5.0
"""Pauses between attempts to reach it again."""

PROBE_S = 5.0
"""Timeout of those checks."""

IDENTIFY_S = 30.0
"""Timeout of the first completion, for which some servers load the model."""

LOG_PERIOD_S = 60.0
"""Failures are logged at most this often."""

MAX_LIST_BYTES = 2**20
"""Bound of the list of models."""

BASE_ANSWER_BYTES, BYTES_PER_TOKEN = 2**16, 16
"""Bound of a proposal's answer: some servers repeat the prompt in it, as text or as token ids."""

_PROBE_TEXT = "The cat sat on the mat. The dog sat on the mat. The cat sat on the"
_PROBE_DEPTH = 8
_NO_HEADERS: Mapping[str, str] = {}


class TargetTokenizer(Protocol):
    """What is needed of the target's tokenizer."""

    vocab_size: int

    @property
    def vocabulary(self) -> Vocabulary:
        """Its tokens by their bytes; raises ValueError if these are not known."""

    def encode(self, text: str, *, is_start: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the text of one token as bytes."""


@dataclass(frozen=True)
class Identity:
    """What a server says about itself.

    Args:
        dialect: Its API.
        model: The model that drafts.
        max_context: Longest sequence, in tokens; None if it does not say.
        num_slots: Slots of a llama.cpp server, each of which keeps one sequence's cache; 0 for other servers.
    """

    dialect: Dialect
    model: str
    max_context: int | None = None
    num_slots: int = 0


async def identify(client: DraftClient, model: str, timeout_s: float = PROBE_S) -> Identity:
    """Ask a server what it is.

    Args:
        client: Its client.
        model: The model that should draft; "" for the first one.
        timeout_s: Deadline of each question.

    Raises:
        DraftServerError: It does not answer, or lists no such model.
    """
    listed = await client.get("/v1/models", timeout_s, MAX_LIST_BYTES)
    data = listed.get("data") if isinstance(listed, dict) else None
    models = [entry for entry in data if isinstance(entry, dict)] if isinstance(data, list) else []
    names = [str(entry.get("id", "")) for entry in models]
    if not models or (model and model not in names):
        shown = ", ".join(names[:8])[:200] or "none"
        raise DraftServerError(Failure.CONTENT, f"no model {model!r} in its list of models: {shown}")
    entry = models[names.index(model) if model else 0]
    dialect = dialect_of(str(entry.get("owned_by", "")))
    num_slots, max_context = 0, entry.get("max_model_len")
    if dialect.name == "llama.cpp":
        num_slots, max_context = await _slots(client, timeout_s)
    if type(max_context) is not int or max_context < 1:
        max_context = None
    return Identity(dialect, str(entry.get("id", ""))[:200], max_context, num_slots)


async def _slots(client: DraftClient, timeout_s: float) -> tuple[int, Any]:
    """Return the number of slots of a llama.cpp server, and the context of each."""
    try:
        props = await client.get("/props", timeout_s, MAX_LIST_BYTES)
    except DraftServerError as error:
        if error.failure is not Failure.STATUS:
            raise
        return 0, None  # the endpoint can be disabled
    props = props if isinstance(props, dict) else {}
    slots, default = props.get("total_slots"), props.get("default_generation_settings")
    num_slots = slots if type(slots) is int and 0 < slots <= 1024 else 0
    return num_slots, default.get("n_ctx") if isinstance(default, dict) else None


class DraftServer:
    """The one server that drafts for the sessions of a replica.

    All sessions avoid a server that failed or was late, for a multiple of the time that this cost. It takes
    token ids if it means the same tokens by them; else text, whose continuation becomes the target's tokens.

    Args:
        url: The server.
        tokenizer: The target's.
        mapping: Setting `vocabulary_mapping`: "tokens" refuses a server that does not take token ids of the
            target's vocabulary, "text" exchanges text with any server.
        key_file: File with the server's API key; "" for none.
        ca_file: PEM file of the CA of its certificate; "" for the system's.

    Attributes:
        url: As given.
        tokenizer: As given.
        identity: What it is; None before the first answer.
        has_ids: Whether it takes and returns token ids of the target's vocabulary.
        is_up: Whether it answers.
        number: How often it was identified: caches of its sessions may be gone when this has changed.
        backoff: Pauses its use after a failure.
        patience: Timeout of its answers.
        failures: Failed calls for proposals, by reason.
        num_sessions: Sessions that it drafts for.

    Raises:
        InvalidArgumentError: A file cannot be read.
    """

    def __init__(
        self,
        url: DraftServerUrl,
        tokenizer: TargetTokenizer,
        mapping: Literal["auto", "tokens", "text"] = "auto",
        key_file: str = "",
        ca_file: str = "",
    ) -> None:
        self.url, self.tokenizer, self._mapping = url, tokenizer, mapping
        self.identity: Identity | None = None
        self.has_ids = self.is_up = False
        self.number = 0
        self.backoff, self.patience = Backoff(), Patience()
        self.failures: Counter[Failure] = Counter()
        self.num_sessions = 0
        self._client = DraftClient(url, key_file, ca_file)
        self.traffic = self._client.traffic
        self._slots: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self._tried, self._lost = asyncio.Event(), asyncio.Event()
        self._logged, self._num_unlogged = -LOG_PERIOD_S, 0

    @property
    def is_usable(self) -> bool:
        """Whether it should be asked now."""
        return self.is_up and self.backoff.ready

    async def start(self, settle_s: float) -> None:
        """Connect within at most `settle_s` seconds, and keep trying after that."""
        self._task = asyncio.create_task(self._watch(), name="server that drafts")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._tried.wait(), settle_s)

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        if self._task is not None:
            await end_tasks(self._task)
        await self._client.close()

    async def ask(
        self,
        ask: Ask,
        timeout_s: float,
        on_body: Callable[[bytes], Mapping[str, str]] = lambda _: _NO_HEADERS,
    ) -> Reply:
        """Return the reply of the server.

        Args:
            ask: What it is asked for.
            timeout_s: Deadline of the call.
            on_body: Called with the body before it is sent; returns further headers.

        Raises:
            DraftServerError: There is none.
        """
        identity = self.identity
        if identity is None:
            raise DraftServerError(Failure.CONNECTION, "it has not answered yet")
        body = json.dumps(identity.dialect.body(ask), separators=(",", ":")).encode()
        max_bytes = BASE_ANSWER_BYTES + BYTES_PER_TOKEN * len(ask.prompt)
        answer = await self._client.post(identity.dialect.path, body, timeout_s, max_bytes, on_body(body))
        return identity.dialect.reply(answer)

    def note_failure(self, error: DraftServerError) -> None:
        """Count a failed call, and log the first one of a period."""
        self.failures[error.failure] += 1
        if error.failure is Failure.CONNECTION or error.code in (401, 403, 404):
            self.is_up = False
            self._lost.set()
        self._log(error)

    def take_slot(self) -> int:
        """Return the slot with the fewest sessions; -1 while there are more sessions than slots."""
        if not self._slots or min(self._slots) > 0:
            return -1
        slot = self._slots.index(0)
        self._slots[slot] += 1
        return slot

    def give_slot(self, slot: int) -> None:
        """Take a slot back."""
        if 0 <= slot < len(self._slots):
            self._slots[slot] = max(0, self._slots[slot] - 1)

    def status(self) -> list[ProcessStatus]:
        """Return its state, as that of a draft process."""
        identity = self.identity
        model = f"{identity.dialect.name}: {identity.model}" if identity is not None else ""
        kernel = "" if identity is None else "token ids" if self.has_ids else "text"
        return [
            ProcessStatus("draft", 0, self.url.address, model, self.is_up, self.num_sessions, kernel=kernel)
        ]

    async def _watch(self) -> None:
        failures = 0
        while True:
            try:
                await self._connect()
                if failures:
                    self.backoff.succeeded()  # it was gone, and is back
                failures, pause_s = 0, WATCH_S
            except (DraftServerError, InvalidArgumentError) as error:
                self.is_up = False
                self._log(error)
                pause_s = min(RECONNECT_CAP_S, RECONNECT_BASE_S * 2 ** min(failures, 10))
                failures += 1
            except Exception:  # a bug must not end the watch: the server would not be found again
                _log.exception("the server that drafts cannot be watched")
                self.is_up, pause_s = False, RECONNECT_CAP_S
            self._tried.set()
            if self.is_up:
                self._lost.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._lost.wait(), pause_s)
            else:
                await asyncio.sleep(pause_s)

    async def _connect(self) -> None:
        """Check that the server answers; after a failure, and for another model, find out what it is.

        Raises:
            DraftServerError: It cannot be used.
            InvalidArgumentError: The key file cannot be read, or the vocabularies cannot be mapped.
        """
        self._client.read_key()
        try:
            identity = await identify(self._client, self.url.model)
        except DraftServerError as error:
            if self.is_up and error.failure is Failure.TIMEOUT:
                return  # a busy server; its proposals show whether it is too slow
            raise
        if self.is_up and self.identity is not None and identity.model == self.identity.model:
            return
        self.identity = identity
        takes_ids = self._mapping != "text" and identity.dialect.has_ids
        self.has_ids = takes_ids and await self._has_same_ids(identity)
        if not self.has_ids:
            await self._check_text(identity)
        self._slots = [0] * identity.num_slots
        self.number += 1
        self.is_up = True
        _log.warning(
            "the server at %s drafts: %s, model %s, %s",
            *(self.url.address, identity.dialect.name, identity.model),
            "token ids" if self.has_ids else "text",
        )

    async def _check_text(self, identity: Identity) -> None:
        """Check that text may and can be exchanged, and prepare for it.

        Raises:
            InvalidArgumentError: It may not, or the bytes of the target's tokens are not known.
        """
        if self._mapping == "tokens":
            got = f"tokens, and {identity.model} has another vocabulary or its API no token ids"
            raise InvalidArgumentError("vocabulary_mapping", got, "auto or text for this server")
        try:
            await in_thread(lambda: self.tokenizer.vocabulary)
        except ValueError as error:
            allowed = "a server of the target's vocabulary that takes token ids"
            raise InvalidArgumentError("draft_server", f"{self.url.address} ({error})", allowed) from None

    async def _has_same_ids(self, identity: Identity) -> bool:
        """Whether the text of the token ids that it returns is the text that it returns.

        Raises:
            DraftServerError: It does not answer.
        """
        ask = Ask(self.tokenizer.encode(_PROBE_TEXT), _PROBE_DEPTH, identity.model, ignores_eos=True)
        try:
            reply = await self.ask(ask, IDENTIFY_S)
        except DraftServerError as error:
            is_refusal = 400 <= error.code < 500 and error.code not in (401, 403, 404, 408, 429)
            if is_refusal or error.failure is Failure.CONTENT:
                return False  # it may refuse token ids that it does not know
            raise
        ids = reply.token_ids or ()
        if not ids or not all(0 <= token_id < self.tokenizer.vocab_size for token_id in ids):
            return False
        own, given = self.tokenizer.decode(ids).strip(" \ufffd"), reply.text.strip(" \ufffd")
        return bool(own) and (own.startswith(given) or given.startswith(own)) and bool(given)

    def _log(self, error: Exception) -> None:
        now = time.monotonic()
        if now - self._logged < LOG_PERIOD_S:
            self._num_unlogged += 1
            return
        others = f" ({self._num_unlogged} more failures since the last message)" if self._num_unlogged else ""
        _log.warning("the server at %s does not draft: %s%s", self.url.address, error, others)
        self._logged, self._num_unlogged = now, 0
