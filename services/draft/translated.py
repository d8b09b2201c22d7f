"""Drafts with a model whose vocabulary differs from the target's.

Sessions, proposals, noise and positions are those of the target; only the draft's cache holds its own tokens,
which are those of the committed text. After a verification the text is tokenised again from its last segment
on, and the cache is cut where the tokens differ. Proposals are chains; nothing is drafted ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor

from gammaray.config import DraftSettings
from gammaray.types import Proposal
from services.draft.scheduler import DraftScheduler
from services.draft.shared_tokens import SharedLogits, TokenChain
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.sampling.noise import Noise
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits, Running
from services.scheduling.scheduler import Scheduler
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import ProposeTask, Timing
from services.speculation.outcomes import AHEAD_ROWS
from services.speculation.predictions import DRAFT_TOP_K, WEIGHT_BITS
from services.vocabulary.translation import Translation


@dataclass(slots=True, eq=False)
class _Drafting(Running[ProposeTask]):
    """A proposal being drafted.

    Args:
        chain: The proposal so far.
        context: The draft's tokens of the committed text; `tail` has those fed after them.
    """

    chain: TokenChain = field(kw_only=True)
    context: Sequence[int] = field(kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Length of the context and the tail."""
        return len(self.context) + len(self.tail)

    def feed(self, start: int, size: int, *, is_last: bool) -> SequenceInput:
        """Return the feed of `size` draft tokens from `start`; the last feed requests the logits."""
        size_of_context = len(self.context)
        token_ids = list(self.context[start : start + size])
        first = max(0, start - size_of_context)
        token_ids += self.tail[first : first + size - len(token_ids)]
        return SequenceInput(self.task.session_id, start, token_ids, self.num_logits if is_last else 0)


class _Translated:
    """What is kept of one session.

    Args:
        session: The session, in the target's tokens.
        translation: The vocabularies.
        shared: The shared tokens.
        limit: Context length of the draft.
    """

    def __init__(
        self, session: SessionCopy, translation: Translation, shared: SharedLogits, limit: int
    ) -> None:
        self.session, self.context = session, translation.context(limit)
        self._shared = shared
        self._source: Noise | None = None
        self._noise: Noise | None = None

    @property
    def noise(self) -> Noise | None:
        """The session's noise, for the shared tokens only."""
        source = self.session.noise
        if source is not self._source:
            self._source, ids = source, self._shared.on_device
            self._noise = source and Noise(source.seed, source.sample_index, len(ids), ids.device, ids)
        return self._noise


class TranslatedDraftScheduler(Scheduler[ProposeTask]):
    """Schedules drafting for sessions of another vocabulary.

    Args:
        engine: The draft model and its cache.
        limits: Bounds of one forward.
        translation: The vocabularies.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.
    """

    role: ClassVar[str] = "draft"

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        translation: Translation,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(engine, limits, translation.target_size, grammars)
        self._shared = SharedLogits(translation.common, engine.device)
        self._open = partial(
            _Translated, translation=translation, shared=self._shared, limit=engine.max_context
        )
        self._sessions: dict[str, _Translated] = {}

    def _reply(self, task: ProposeTask, outcome: object, timing: Timing | None = None) -> None:
        super()._reply(task, None if task.is_notice else outcome, timing)

    def _forget(self, session: SessionCopy) -> None:
        self._sessions.pop(session.session_id, None)
        super()._forget(session)

    def _match_cache(self, session: SessionCopy) -> None:
        """Translate what was committed; drop cached tokens that are no longer those of the text."""
        translated = self._sessions.get(session.session_id)
        if translated is None:
            translated = self._sessions[session.session_id] = self._open(session)
        kept = translated.context.follow(session.tokens, session.changed_from)
        self._match_tokens(session, translated.context.tokens, kept)

    def _start(self, task: ProposeTask, session: SessionCopy) -> Running[ProposeTask] | Proposal:
        translated = self._sessions[task.session_id]
        context = translated.context.tokens
        if not 0 < len(context) < self.engine.max_context:
            return Proposal()
        chain = TokenChain(
            *(session, self._shared, translated.noise, task.shape), top_k=DRAFT_TOP_K, bits=WEIGHT_BITS
        )
        return _Drafting(task, session, [], num_logits=1, chain=chain, context=context)

    def _advance(self, running: Running[ProposeTask], logits: Tensor) -> Proposal | None:
        assert isinstance(running, _Drafting)
        token_id = running.chain.take(logits)
        if token_id is not None and running.num_tokens < self.engine.max_context:
            running.tail.append(token_id)
            return None
        return running.chain.finish()


def make_draft_scheduler(
    engine: Engine,
    limits: Limits,
    settings: DraftSettings,
    translation: Translation | None,
    grammars: Grammars | None = None,
) -> Scheduler[ProposeTask]:
    """Return the scheduler of a draft worker.

    Args:
        engine: The draft model and its cache.
        limits: Bounds of one forward.
        settings: The worker's settings.
        translation: The vocabularies if they differ, else None.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.
    """
    if translation is not None:
        return TranslatedDraftScheduler(engine, limits, translation, grammars=grammars)
    ahead_rows = AHEAD_ROWS if settings.draft_ahead else 0
    return DraftScheduler(engine, limits, ahead_rows=ahead_rows, grammars=grammars)
