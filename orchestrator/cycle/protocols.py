"""Protocols that `run_cycle` depends on: drafter, verifier, store and gamma controller."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from gammaray.blocks import Shape, TokenLogprobs, Verdict
from gammaray.types import TokenOrigin
from orchestrator.cycle.session import Session
from orchestrator.cycle.types import Cycle, Draft


class Drafter(Protocol):
    """Proposes tokens for one session; it affects speed, never the output."""

    async def propose(self, session: Session, shape: Shape) -> Draft:
        """Return tokens that may follow the committed ones, a chain or a tree within `shape`.

        A head drafts in the target worker: it returns `DraftHere` instead of tokens.

        Raises:
            GammarayError: There is no proposal; the cycle continues without one.
        """


class Verifier(Protocol):
    """Verifies drafts for one session."""

    async def verify(self, session: Session, draft: Draft) -> Verdict:
        """Return the target's verdict on a proposal, which may be empty, or on what its own head drafts.

        Raises:
            InvalidArgumentError: The target refuses the draft.
            GammarayError: No verdict; the request fails.
        """


class SessionStore(Protocol):
    """Stores session data that must outlive this process."""

    def append(
        self,
        session: Session,
        token_ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Coroutine[Any, Any, None]:
        """Store the session's last committed tokens, which are `token_ids`, and its `finish_reason`.

        The session is read in the call itself, not when the result is awaited: it may change in between.

        Raises:
            FailedPreconditionError: The session has another owner by now.
            CancelledError: It was cancelled.
            UnavailableError: The store cannot be reached.
        """


class GammaController(Protocol):
    """Chooses gamma and the width of the proposal."""

    def next_shape(self) -> Shape:
        """Return the shape of the next cycle's proposal."""

    def observe(self, cycle: Cycle) -> None:
        """Learn from a finished cycle."""
