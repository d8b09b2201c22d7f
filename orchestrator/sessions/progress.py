"""Chunks that the client receives for a session's cycles."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from gammaray.maths.acceptance import SpeculationCounters
from gammaray.types import Chunk, DrafterKind, EmittedToken, FinishReason, TokenOrigin, TopLogprob, Usage
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle
from orchestrator.storage.token_records import StoredToken
from orchestrator.text.tokenizer import Tokenizer


class ChunkBuilder:
    """Turns the cycles of one session into chunks after `offset` tokens, and counts them.

    Counts, which continue `counters` and `elapsed_s` of earlier owners, cover emitted tokens only: tokens
    after the end of the completion count neither as accepted nor as tested.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        offset: int = 0,
        counters: SpeculationCounters | None = None,
        elapsed_s: float = 0.0,
    ) -> None:
        self._session, self._tokenizer, self._offset = session, tokenizer, offset
        self.counters = counters or SpeculationCounters()
        self.has_ended = False
        self._start = time.perf_counter() - elapsed_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first cycle."""
        return time.perf_counter() - self._start

    def chunk(self, cycle: Cycle, plain_cycle_s: float | None) -> Chunk:
        """Count a cycle and return its chunk; the last chunk has usage and summary."""
        self._count(cycle, plain_cycle_s)
        logprobs = cycle.logprobs or (None,) * len(cycle.token_ids)
        tokens = zip(cycle.token_ids, cycle.origins, logprobs, strict=True)
        return self.piece(tokens, cycle.text, cycle.finish_reason, cycle.drafter)

    def piece(
        self,
        tokens: Iterable[StoredToken],
        text: str,
        finish_reason: FinishReason | None = None,
        drafter: DrafterKind | None = None,
    ) -> Chunk:
        """Return the chunk of the next tokens without counting them; `drafter` proposed the accepted ones."""
        emitted = tuple(emitted_token(token, self._tokenizer, drafter) for token in tokens)
        session, offset = self._session, self._offset
        self._offset += len(emitted)
        piece = Chunk(
            session.session_id,
            text,
            emitted,
            session.params.seed or 0,
            offset=offset,
            turn=session.turn,
            prompt_tokens=len(session.prompt),
            prompt_logprobs=session.prompt_logprobs,
        )
        session.prompt_logprobs = None
        if finish_reason is None:
            return piece
        self.has_ended = True
        usage = Usage(
            prompt_tokens=len(session.prompt),
            completion_tokens=self._offset,
            accepted_prediction_tokens=self.counters.prediction_accepted,
            rejected_prediction_tokens=self.counters.prediction_drafted - self.counters.prediction_accepted,
            cached_tokens=session.num_cached,
        )
        summary = self.counters.summary(self.elapsed_s)
        return replace(piece, finish_reason=finish_reason, usage=usage, summary=summary)

    def _count(self, cycle: Cycle, plain_cycle_s: float | None) -> None:
        emitted = len(cycle.token_ids)
        self.counters.observe(
            gamma=cycle.num_drafted,
            tested=min(cycle.num_tested, emitted),
            accepted=sum(origin is TokenOrigin.ACCEPTED for origin in cycle.origins),
            emitted=emitted,
            draft_s=cycle.draft_s,
            verify_s=cycle.verify_s,
            cycle_s=cycle.total_s,
            plain_cycle_s=plain_cycle_s,
            drafter=cycle.drafter,
            draft_worker=cycle.draft_worker,
            is_fallback=cycle.is_fallback,
        )


def emitted_token(
    token: StoredToken, tokenizer: Tokenizer, drafter: DrafterKind | None = None
) -> EmittedToken:
    """Return a committed token in the form that clients receive; `drafter` proposed it if it was accepted."""
    token_id, origin, logprobs = token
    token_bytes = tokenizer.token_bytes
    proposed_by = drafter if origin is TokenOrigin.ACCEPTED else None
    if logprobs is None:
        return EmittedToken(token_id, origin, token_bytes(token_id), drafter=proposed_by)
    top = tuple(TopLogprob(other, logprob, token_bytes(other)) for other, logprob in logprobs.top)
    return EmittedToken(token_id, origin, token_bytes(token_id), logprobs.logprob, top, proposed_by)
