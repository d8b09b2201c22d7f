"""Verifier of one session, on a target worker, and on another one when that fails."""

from __future__ import annotations

import asyncio
import math
import time
from functools import partial

from gammaray.errors import DeadlineExceededError, GammarayError, InternalError, UnavailableError
from gammaray.types import PromptLogprobs, Proposal
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.convert import (
    origin_from_proto,
    prompt_logprobs_from_proto,
    proposal_to_proto,
)
from orchestrator.identity import TargetLink, identity_of, of_identity, why_nobody
from orchestrator.links import WorkerLink
from orchestrator.remote import Remote
from orchestrator.session import Session
from orchestrator.text.cpu_threads import INLINE_NUMBERS, in_thread
from orchestrator.verdicts import (
    TokenLogprobs,
    Verdict,
    VerifyTiming,
)
from orchestrator.workers import WorkerPool

__all__ = ["RemoteVerifier"]

RETRY_PAUSE_S = 0.05
"""Between attempts at a target worker that is there and fails at once."""


class RemoteVerifier(Remote[target_pb.VerifyBlock, target_pb.VerifyResult]):
    """Verifies through a target worker, another one when it dies; implements the cycle's Verifier.

    Args:
        pool: The target workers.
        spec: What they must know of the session.
        timeout_s: Deadline of one verification.
        wait_s: How long to wait for a target worker to be there.
    """

    def __init__(
        self,
        pool: WorkerPool[target_pb.VerifyBlock, target_pb.VerifyResult],
        spec: pb.SessionSpec,
        *,
        timeout_s: float,
        wait_s: float,
    ) -> None:
        super().__init__(pool, spec)
        self._timeout_s, self._wait_s = timeout_s, wait_s
        self._proposal = Proposal()
        self._identity = ""

    def prefer(self, session: Session, address: str) -> None:
        """Use the worker at an address if it can be used, and is of the session's model."""
        link = self._pool.links.get(address)
        if link is not None and of_identity(session.model_identity)(link):
            super().prefer(session, address)

    async def verify(self, session: Session, proposal: Proposal) -> Verdict:
        """Return the target's verdict.

        Raises:
            UnavailableError: No target worker in time, or they keep dying.
            ModelChangedError: Those that are there are of other models than the session's.
            GammarayError: What the worker answered.
        """
        self._proposal = proposal
        deadline: float | None = None
        while True:
            left_s = self._wait_s if deadline is None else max(0.0, deadline - time.monotonic())
            link = await self._choose(session, left_s)
            self._attach(session, link)
            # The worker itself compares it: another process may have come to its address just now.
            self._identity = session.model_identity or identity_of(link)
            start = time.monotonic()
            try:
                result = await self._ask(session, link, self._timeout_s)
            except (UnavailableError, DeadlineExceededError) as error:
                session.left_s(0)  # past the caller's deadline no other worker helps, and none is to blame
                self._leave(session, link, error, time.monotonic() - start)
                deadline = deadline or time.monotonic() + self._wait_s
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            link.backoff.succeeded()
            # The worker's cache holds the accepted tokens; its own last token was never fed.
            self._num_known = self._base_position + len(result.verdict.accepted_path)
            verdict = self._verdict(session, link, result)
            session.model_identity = self._identity
            if session.lacks_prompt_logprobs:
                told = result.verdict.prompt_logprobs
                if len(told.logprobs) + len(told.top_logprobs) <= INLINE_NUMBERS:
                    session.prompt_logprobs = _prompt_logprobs(session, link, result.verdict)
                else:
                    session.prompt_logprobs = await in_thread(_prompt_logprobs, session, link, result.verdict)
            if session.num_emitted == 0:
                session.num_cached = min(result.timing.cached_tokens, len(session.prompt))
            return verdict

    async def _choose(self, session: Session, timeout_s: float) -> TargetLink:
        """Return the worker in use, or another one of the session's model."""
        suits = of_identity(session.model_identity)
        link = self._link
        if link is not None and link.is_up and not link.is_draining and suits(link):
            return link
        try:
            return await self._pool.wait(session.left_s(timeout_s), suits, partial(self._keys, session))
        except UnavailableError as error:
            raise why_nobody(self._pool, session.session_id, session.model_identity, error) from None

    def _fill(self, session: Session, block: target_pb.VerifyBlock) -> None:
        super()._fill(session, block)
        if block.HasField("spec"):
            block.spec.model_identity = self._identity

    def _verdict(
        self,
        session: Session,
        link: WorkerLink[target_pb.VerifyBlock, target_pb.VerifyResult],
        result: target_pb.VerifyResult,
    ) -> Verdict:
        """Return what a target says, after checking what others stand on.

        Raises:
            InternalError: It makes no sense.
        """
        message, has_logprobs = result.verdict, session.num_top_logprobs is not None
        vocab_size = link.info.vocab_size if link.info is not None else 0
        if message.next_token_id >= vocab_size or message.num_tested > len(self._proposal):
            raise InternalError(f"the target worker at {link.address} sent a verdict that cannot be")
        if has_logprobs and not all(_is_sound(entry, vocab_size) for entry in message.logprobs):
            raise InternalError(f"the target worker at {link.address} sent log-probabilities that cannot be")
        return _verdict(message, result.timing, has_logprobs=has_logprobs)

    def _leave(
        self,
        session: Session,
        link: WorkerLink[target_pb.VerifyBlock, target_pb.VerifyResult],
        error: GammarayError,
        lost_s: float,
    ) -> None:
        """Go away from a worker that failed.

        Raises:
            DeadlineExceededError: It is late, and there is no other.
        """
        if link.is_up:
            self.release(session)
        else:
            self._detach(session)
        link.prefixes.clear()  # what it has read is no reason to ask it again
        if isinstance(error, DeadlineExceededError):
            link.backoff.failed(lost_s)
            if self._pool.pick(of_identity(session.model_identity)) is None:
                raise error

    def _block(self, session: Session) -> target_pb.VerifyBlock:
        return target_pb.VerifyBlock(
            proposal=proposal_to_proto(self._proposal),
            num_top_logprobs=session.num_top_logprobs,
            num_prompt_logprobs=session.num_prompt_logprobs if session.lacks_prompt_logprobs else None,
        )


def _prompt_logprobs(session: Session, link: TargetLink, verdict: target_pb.Verdict) -> PromptLogprobs:
    """Return what a target says of the prompt, after checking it.

    Raises:
        InternalError: It makes no sense.
    """
    found = prompt_logprobs_from_proto(verdict.prompt_logprobs, session.prompt)
    vocab_size = link.info.vocab_size if link.info is not None else 0
    if (
        found.num_top > (session.num_prompt_logprobs or 0)
        or max(found.top_token_ids, default=0) >= vocab_size
    ):
        raise InternalError(f"the target worker at {link.address} sent log-probabilities that cannot be")
    return found


def _is_sound(entry: target_pb.TokenLogprobs, vocab_size: int) -> bool:
    return (
        len(entry.top_token_ids) == len(entry.top_logprobs)
        and not math.isnan(entry.logprob)
        and not any(map(math.isnan, entry.top_logprobs))
        and all(token_id < vocab_size for token_id in entry.top_token_ids)
    )


def _verdict(message: target_pb.Verdict, timing: pb.WorkerTiming, *, has_logprobs: bool) -> Verdict:
    return Verdict(
        accepted_path=tuple(message.accepted_path),
        next_token_id=message.next_token_id,
        next_origin=origin_from_proto(message.next_origin),
        num_tested=message.num_tested,
        logprobs=tuple(
            TokenLogprobs(entry.logprob, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
            for entry in (message.logprobs if has_logprobs else ())
        ),
        timing=VerifyTiming(
            timing.queue_us * 1e-6, timing.compute_us * 1e-6, timing.batch_size, timing.batch_tokens
        )
        if timing.batch_tokens > 0
        else None,
    )
