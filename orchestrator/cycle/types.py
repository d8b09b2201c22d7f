"""Value types of a cycle: calls to workers, the levels that were tested, and the cycle's result."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gammaray.blocks import Shape, TokenLogprobs, VerifyTiming
from gammaray.errors import GammarayError
from gammaray.types import DrafterKind, FinishReason, Proposal, TokenOrigin

PLAIN = Shape(0)
EMPTY = Proposal()

Level = tuple[int, int]
"""Number of children at one tested level, and the index of the accepted one; -1 if none was."""


@dataclass(frozen=True, slots=True)
class DraftHere:
    """Asks the target worker to draft with its head, within `shape`, and to verify that in the same call."""

    shape: Shape


Draft = Proposal | DraftHere
"""What a verifier is given: tokens to verify, or the order to draft them itself."""


class Call:
    """The blocks sent to one worker in one cycle, and its answers.

    Without `parent`, the `traceparent` of the blocks, the session is not sampled, and no clock is read;
    `following` is that of the next cycle's, for blocks that are sent early.
    """

    __slots__ = (
        *("_parent", "address", "began", "blocks", "ended", "error"),
        *("following", "is_notice", "results"),
    )

    def __init__(self, parent: str | None = None, following: str = "") -> None:
        self._parent, self.following = parent, following
        self.address = self.error = ""  # of the worker that was called last; class name of the last failure
        self.blocks: list[Any] = []
        self.results: list[Any] = []
        self.began = self.ended = 0.0  # `time.perf_counter()` at the first block and the last answer
        self.is_notice = False  # whether the block only tells that a lookahead proposal was used

    @property
    def is_over(self) -> bool:
        """Whether the last block was answered or abandoned."""
        return self.is_notice or len(self.results) == len(self.blocks)

    def sent(self, block: Any) -> None:
        """Record a sent block and set its trace context."""
        if self._parent is not None:
            block.trace.traceparent = self._parent
            self.began = self.began or time.perf_counter()
        self.blocks.append(block)

    def notified(self, notice: Any) -> None:
        """Record a block that gets no answer."""
        self.sent(notice)
        self.is_notice = True

    def answered(self, result: Any) -> None:
        self.results.append(result)
        if self._parent is not None:
            self.ended = time.perf_counter()

    def failed(self, error: GammarayError) -> None:
        """Record that the last block failed or was answered with an error."""
        self.error = type(error).__name__
        if not self.is_over:
            self.answered(None)


def levels_of(proposal: Proposal, accepted_path: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels that verification visited, from the root down: its evidence about acceptance."""
    if proposal.parents is None:
        levels: list[Level] = [(1, 0)] * len(accepted_path)
        return tuple(levels) if len(levels) == len(proposal) else (*levels, (1, -1))
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(proposal.parents):
        children.setdefault(parent, []).append(node)
    levels, parent = [], -1
    for node in accepted_path:
        siblings = children[parent]
        levels.append((len(siblings), siblings.index(node)))
        parent = node
    if parent in children:
        levels.append((len(children[parent]), -1))
    return tuple(levels)


@dataclass(frozen=True)
class Match:
    """A chain of tokens that a look-up found."""

    kind: DrafterKind  # kind of the drafter that found it
    token_ids: tuple[int, ...]  # the chain, at least one token
    length: int  # latest tokens of the session that occur before the chain in the text where it was found
    probabilities: tuple[float, ...]  # the drafter's estimate per token that it is right; 1.0: none

    @property
    def expected_tokens(self) -> float:
        """Expected number of accepted tokens, if the probabilities are right."""
        paths: Iterator[float] = itertools.accumulate(self.probabilities, operator.mul)
        return sum(paths)


@dataclass(frozen=True)
class Candidates:
    """What could be proposed in a cycle."""

    models: Sequence[DrafterKind] = ()  # kinds of the models that can propose
    matches: Sequence[Match] = ()  # what look-ups found; at most one match of each
    num_forced: int = 0  # tokens that the grammar forces
    is_fallback: bool = False  # whether the request allows a model, and none is there


@dataclass(frozen=True)
class Cycle:
    """The result of one cycle."""

    gamma: int  # depth of the requested proposal
    num_drafted: int  # nodes of the verified proposal; 0 if the drafter failed
    num_tested: int
    num_accepted: int  # proposed tokens that the target accepted, also those after the end of the completion
    token_ids: tuple[int, ...]  # the emitted tokens, at least one
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per emitted token if requested, else empty
    text: str  # text that became complete in this cycle
    finish_reason: FinishReason | None  # set when this cycle ended the completion
    draft_s: float  # seconds waited for the proposal
    verify_s: float  # seconds waited for the verdict
    total_s: float
    is_first: bool  # whether it was the session's first cycle, whose waits include the prefill
    draft_failed: bool  # whether the drafter failed or was late
    shape: Shape = PLAIN  # the requested shape with the controller's reason; its depth is `gamma`
    levels: tuple[Level, ...] = ()  # the levels of the proposal that verification visited, see `levels_of`
    timing: VerifyTiming | None = None  # timing of the target worker's step; None if it did not report any
    drafter: DrafterKind = DrafterKind.NONE  # drafter kind that proposed; NONE if nothing was proposed
    drafter_version: int = 0  # version of the head or draft model that proposed, see `Proposal`
    draft_worker: str = ""  # address of the draft worker that proposed, "" for none
    is_fallback: bool = False  # whether the drafter that the request allows could not propose
    is_prepared: bool = False  # whether the proposal was computed before it was requested
    started: float = 0.0  # `time.perf_counter()` at the start of the cycle
    # Seconds per token that was decoded before the cycle asked for it, 0 if unknown; None: a block did.
    ahead_s: float | None = None

    @property
    def cost_s(self) -> float:
        """Seconds that the cycle took, or each of its tokens took that were decoded ahead; 0 if unknown."""
        return self.total_s if self.ahead_s is None else self.ahead_s

    @property
    def first_children(self) -> tuple[int, int]:
        """How many first children, which form a chain, were tested, and accepted up to the first failure."""
        accepted = 0
        for _, rank in self.levels:
            if rank != 0:
                return accepted + 1, accepted
            accepted += 1
        return accepted, accepted

    @property
    def has_fallen_back(self) -> bool:
        """Whether the chosen drafter failed in this cycle, which is evidence for no drafter."""
        return self.draft_failed or (self.is_fallback and not self.shape.is_fallback)
