"""Proposals asked of a draft scheduler directly: vLLM's, or the CPU engine's for comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from gammaray.blocks import Shape
from gammaray.types import Proposal, SparseDistribution
from services.scheduling.tasks import ProposeTask, Reply
from tests.support.vllm_helpers import MAX_STEPS, Session, answers

_request_ids = itertools.count(1)


def draft_task(session: Session, depth: int, max_nodes: int = 0, **changes: Any) -> ProposeTask:
    """Return a block that asks for a proposal after a session's tokens, all of which it brings."""
    fields: dict[str, Any] = {
        "request_id": next(_request_ids),
        "session_id": session.name,
        "epoch": session.epoch,
        "base_position": len(session.tokens),
        "context_start": 0,
        "context": list(session.tokens),
        "spec": session.spec(),
        "deadline": math.inf,
        "deliver": lambda task, reply: None,
        "shape": Shape(depth, max_nodes),
    }
    return ProposeTask(**{**fields, **changes})


def draft(scheduler: Any, sessions: Sequence[Session], depth: int) -> list[Any]:
    """Ask for a proposal of each session in one batch; return them, or what came instead."""
    tasks = [draft_task(session, depth) for session in sessions]
    return [reply.outcome for reply in answers(scheduler, tasks)]


def answer(scheduler: Any, task: ProposeTask) -> Reply:
    """Step until a submitted block has its answer, and return that."""
    for _ in range(MAX_STEPS):
        for answered, reply in scheduler.step():
            if answered is task:
                return reply
    raise AssertionError(f"no answer after {MAX_STEPS} steps")


def assert_alike(ours: Proposal, theirs: Proposal) -> None:
    """Check that proposals have the same tokens, and distributions that differ by rounding at most."""
    assert isinstance(ours, Proposal), ours
    assert ours.token_ids == theirs.token_ids
    assert (ours.draft_distributions is None) == (theirs.draft_distributions is None)
    for one, other in zip(ours.draft_distributions or (), theirs.draft_distributions or (), strict=True):
        assert _difference(one, other) <= 1


def _difference(one: SparseDistribution, other: SparseDistribution) -> int:
    """Return the largest difference of a token's weight."""
    weights = dict(zip(one.token_ids, one.weights, strict=True))
    others = dict(zip(other.token_ids, other.weights, strict=True))
    return max(abs(weights.get(key, 0) - others.get(key, 0)) for key in weights.keys() | others.keys())
