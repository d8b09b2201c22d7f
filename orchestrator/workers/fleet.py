"""All workers of an orchestrator: discovered through the registry, checked for a common vocabulary."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from gammaray.aio import end_tasks
from gammaray.blocks import OLDEST_PROTOCOL, PROTOCOL
from gammaray.errors import FailedPreconditionError, GammarayError, InvalidArgumentError
from gammaray.security.tls import TlsFiles
from gammaray.types import ProcessStatus
from orchestrator.workers.pool import WorkerPool
from orchestrator.workers.protocol import DRAFT, TARGET, WorkerInfo
from orchestrator.workers.verifier import info_of

_log = logging.getLogger(__name__)

WATCH_PERIOD_S = 1.0


class Fleet:
    """The draft and the target workers.

    A worker whose vocabulary differs from the served model's is refused: its token ids mean other tokens.

    Args:
        workers: Returns the addresses of the announced workers by role; called once a second. Raises
            GammarayError if the registry cannot be reached, or refuses the command.
        vocab_sha256: Hash of its tokenizer's vocabulary; if empty, workers are only compared with each other.
    """

    def __init__(
        self,
        workers: Callable[[], Awaitable[Mapping[str, set[str]]]],
        vocab_size: int,
        *,
        vocab_sha256: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        self._workers, self._vocab_size, self._vocab_sha256 = workers, vocab_size, vocab_sha256
        self.targets = WorkerPool(TARGET, self._check_target, tls)
        self.drafts = WorkerPool(DRAFT, self._check_draft, tls)
        self._task: asyncio.Task[None] | None = None
        self._has_registry = True

    async def start(self, connect_s: float) -> None:
        """Connect to the known workers within at most `connect_s` seconds, and watch for others."""
        await self._look_again()
        await self.targets.wait_until_connected(connect_s)
        await self.drafts.wait_until_connected(connect_s)
        try:
            self._check_all()
        except GammarayError:
            await self.close()
            raise
        self._task = asyncio.create_task(self._watch(), name="worker registry")

    @property
    def max_context(self) -> int | None:
        """Longest sequence that every connected target accepts, in tokens; None if none is connected."""
        up = [link for link in self.targets.links.values() if link.is_up]
        return min((info_of(link).max_context for link in up), default=None)

    @property
    def identities(self) -> set[str]:
        """Model identities of the targets, also of those whose link is down."""
        return {info_of(link).model_identity for link in self.targets.links.values()}

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that targets serve, also of those whose link is down."""
        return sorted({name for link in self.targets.links.values() for name in info_of(link).adapters})

    def release(self, session_id: str, epoch: int, *, forget: bool = False) -> None:
        """Release a session on all workers, except caches of newer epochs (0: of any); returns at once.

        With `forget` workers drop all its caches, also released ones, which otherwise may serve other
        sessions with the same prefix.
        """
        for links in (self.targets.links, self.drafts.links):
            for link in links.values():
                link.release(session_id, epoch, forget=forget)

    def unusable(self) -> list[str]:
        """Return each worker that cannot be used, with its address and the reason."""
        return [*self.drafts.unusable(), *self.targets.unusable()]

    def status(self) -> list[ProcessStatus]:
        return [*self.drafts.status(), *self.targets.status()]

    async def close(self) -> None:
        if self._task is not None:
            await end_tasks(self._task)
        await asyncio.gather(self.targets.close(), self.drafts.close())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            await self._look_again()

    async def _look_again(self) -> None:
        """Poll the registry; known workers are kept while it fails, whatever the error."""
        try:
            found = await self._workers()
        except GammarayError as error:
            if self._has_registry:
                _log.warning("the worker registry does not answer, known workers stay: %s", error)
            self._has_registry = False
        except Exception:  # a bug must not end the watch: no new worker would be found
            _log.exception("the worker registry cannot be read, known workers stay")
            self._has_registry = False
        else:
            if not self._has_registry:
                _log.warning("the worker registry answers again")
            self._has_registry = True
            self.targets.announce(found["target"])
            self.drafts.announce(found["draft"])

    def _check_all(self) -> None:
        for refusal in (*self.targets.refusals(), *self.drafts.refusals()):
            # Workers of another version come and go in upgrades.
            if isinstance(refusal, InvalidArgumentError):
                raise refusal
        for link in self.drafts.links.values():  # some may have connected before any target
            if link.info is not None and link.refusal is None:
                self._check_draft(link.info)

    def _check_target(self, info: WorkerInfo) -> None:
        self._check_vocabulary("target", info, {self._vocab_sha256}, "a model", "the served model's")

    def _check_draft(self, info: WorkerInfo) -> None:
        targets = [link for link in self.targets.links.values() if link.refusal is None]
        known = {self._vocab_sha256, *(link.info.vocab_sha256 for link in targets if link.info is not None)}
        self._check_vocabulary("draft", info, known, "a draft model", "the target's")

    def _check_vocabulary(self, role: str, info: WorkerInfo, known: set[str], what: str, whose: str) -> None:
        """Check that a worker speaks this protocol, and that its token ids mean the same tokens."""
        if info.oldest_protocol > PROTOCOL or info.protocol < OLDEST_PROTOCOL:
            raise FailedPreconditionError(
                f"the {role} worker speaks versions {info.oldest_protocol} to {info.protocol} of the "
                f"protocol, this orchestrator {OLDEST_PROTOCOL} to {PROTOCOL}: upgrade the older of the two"
            )
        if info.vocab_size != self._vocab_size:
            got = f"{info.model} with {info.vocab_size} token ids"
            raise InvalidArgumentError(role, got, f"{what} with {whose} {self._vocab_size} token ids")
        # Models without a tokenizer have no hash.
        if info.vocab_sha256 and known - {"", info.vocab_sha256}:
            got = f"{info.model}, whose {info.vocab_size} token ids mean other tokens"
            allowed = f"{what} with {whose} vocabulary ({self._vocab_size} token ids)"
            raise InvalidArgumentError(role, got, allowed)
