"""What the client is told of a session's cycles."""

from __future__ import annotations

import time

from gammaray.metrics import SpeculationCounters
from gammaray.types import Chunk, EmittedToken, TokenOrigin, TopLogprob, Usage
from orchestrator.cycle import Cycle, TokenLogprobs
from orchestrator.session import Session
from orchestrator.tokenizer import Tokenizer

__all__ = ["Progress"]


class Progress:
    """Turns the cycles of one session into chunks and counts them.

    Counts are those of emitted tokens: what stood behind the cut of the last cycle is not among the accepted
    or tested ones.

    Args:
        session: The session; its first cycle starts now.
        tokenizer: The target's.
    """

    def __init__(self, session: Session, tokenizer: Tokenizer) -> None:
        self._session, self._tokenizer = session, tokenizer
        self._counters = SpeculationCounters()
        self._start = time.perf_counter()

    def chunk(self, cycle: Cycle, plain_cycle_s: float | None) -> Chunk:
        """Return the piece of the completion that a cycle emitted; the last one has usage and summary."""
        self._count(cycle, plain_cycle_s)
        tokens = tuple(self._token(cycle, index) for index in range(len(cycle.token_ids)))
        session = self._session
        seed = session.params.seed or 0
        if cycle.finish_reason is None:
            return Chunk(session.session_id, cycle.text, tokens, seed)
        return Chunk(
            session.session_id,
            cycle.text,
            tokens,
            seed,
            finish_reason=cycle.finish_reason,
            usage=Usage(
                prompt_tokens=len(session.prompt),
                completion_tokens=session.num_emitted,
                accepted_prediction_tokens=self._counters.accepted,
                rejected_prediction_tokens=self._counters.drafted - self._counters.accepted,
            ),
            summary=self._counters.summary(time.perf_counter() - self._start),
        )

    def _count(self, cycle: Cycle, plain_cycle_s: float | None) -> None:
        emitted = len(cycle.token_ids)
        self._counters.observe(
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

    def _token(self, cycle: Cycle, index: int) -> EmittedToken:
        token_id, token_bytes = cycle.token_ids[index], self._tokenizer.token_bytes
        if not cycle.logprobs:
            return EmittedToken(token_id, cycle.origins[index], token_bytes(token_id))
        logprobs: TokenLogprobs = cycle.logprobs[index]
        top = tuple(TopLogprob(other, logprob, token_bytes(other)) for other, logprob in logprobs.top)
        return EmittedToken(token_id, cycle.origins[index], token_bytes(token_id), logprobs.logprob, top)
