"""A session is the text of one target model: who may go on with it, and what is said where nobody may.

A session takes the identity of the target worker that gave its first tokens (`services/identity.py` tells
what an identity is); the store keeps it with them, and refuses tokens of another. Before that, and in
sessions that were stored by a version without identities, it has none, and any worker will do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gammaray.errors import GammarayError, ModelChangedError, UnavailableError
from gammaray.v1 import target_service_pb2 as target_pb
from orchestrator.links import WorkerLink
from orchestrator.workers import WorkerPool

__all__ = ["TargetLink", "TargetPool", "check_served", "identity_of", "of_identity", "why_nobody"]

TargetLink = WorkerLink[target_pb.VerifyBlock, target_pb.VerifyResult]
TargetPool = WorkerPool[target_pb.VerifyBlock, target_pb.VerifyResult]


def identity_of(link: WorkerLink[Any, Any]) -> str:
    """Return what a worker last said it is, empty when it did not say."""
    return link.info.model_identity if isinstance(link.info, target_pb.GetTargetInfoResponse) else ""


def of_identity(identity: str) -> Callable[[TargetLink], bool]:
    """Return whether a worker may go on with a session of an identity."""
    return lambda link: not identity or identity_of(link) == identity


async def check_served(pool: TargetPool, session_id: str, identity: str, timeout_s: float) -> None:
    """Check that a session can go on, before anybody takes it over or begins a turn of it.

    While workers of its model may come back, as long as `timeout_s`, they are waited for. Without any target
    worker nothing can be said yet, and nothing is.

    Raises:
        ModelChangedError: The target workers that are there are all of other models.
        UnavailableError: One of its model is there and takes nothing new, or all went away meanwhile.
    """
    if pool.pick_any(of_identity(identity)) is not None or pool.pick_any() is None:
        return
    try:
        await pool.wait(timeout_s, of_identity(identity))
    except UnavailableError as error:
        raise why_nobody(pool, session_id, identity, error) from None


def why_nobody(pool: TargetPool, session_id: str, identity: str, error: UnavailableError) -> GammarayError:
    """Return why no worker went on with a session: the error, or that those there are of other models."""
    others = {identity_of(link) for link in pool.links.values() if link.is_up}
    if not identity or not others or identity in others:
        return error
    return ModelChangedError(session_id, identity, sorted(others))
