"""Conversion between messages of the block protocol and its types, for orchestrator and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gammaray.blocks import Shape, TokenLogprobs, Verdict, VerifyTiming
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import MAX_GAMMA, MAX_NODES, PromptLogprobs, Proposal, SparseDistribution, TokenOrigin
from gammaray.v1 import draft_service_pb2 as draft_pb
from gammaray.v1 import target_service_pb2 as target_pb
from gammaray.v1 import types_pb2 as pb
from gammaray.wire.enums import ORIGINS, origin_from_proto

MAX_SUPPORT = 4096
"""Upper bound of tokens in a draft distribution, the same as of the drafter's setting: 64 distributions stay
below a target worker's maximum frame size, so that no drafter can break the stream of all sessions."""

_SLICE = 4096
"""Numbers of a column converted per call, which holds the GIL."""


def shape_to_proto(shape: Shape) -> draft_pb.ProposeBlock:
    """Return a block that asks for a proposal of a shape, and for those prepared to follow it."""
    return draft_pb.ProposeBlock(
        gamma=shape.depth, max_nodes=shape.max_nodes, drafted_depth=shape.drafted_depth, wants_ahead=True
    )


def shape_from_proto(block: draft_pb.ProposeBlock | target_pb.HeadDraft, least: int = 1) -> Shape:
    """Return the shape that a block asks for, or asks of a head, with a depth of at least `least`."""
    if not least <= block.gamma <= MAX_GAMMA:
        raise InvalidArgumentError("gamma", block.gamma, f"{least} to {MAX_GAMMA}")
    if block.max_nodes > MAX_NODES:
        raise InvalidArgumentError("max_nodes", block.max_nodes, f"0 to {MAX_NODES}")
    drafted_depth = block.drafted_depth if isinstance(block, draft_pb.ProposeBlock) else 0
    return Shape(block.gamma, block.max_nodes, drafted_depth)


def proposal_to_proto(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(
        token_ids=proposal.token_ids,
        parents=proposal.parents or (),
        draft_distributions=[
            pb.SparseDistribution(token_ids=d.token_ids, weights=d.weights, weight_bits=d.weight_bits)
            for d in proposal.draft_distributions or ()
        ],
        version=proposal.version,
    )


def proposal_from_proto(message: pb.Proposal, vocab_size: int) -> Proposal:
    """Return the proposal of an untrusted wire message; InvalidArgumentError if its parts do not match."""
    token_ids = tuple(message.token_ids)
    if any(token_id >= vocab_size for token_id in token_ids):
        raise InvalidArgumentError("proposal.token_ids", max(token_ids), f"below {vocab_size}")
    parents = tuple(message.parents) or None
    if parents is not None:
        if len(parents) != len(token_ids):
            raise InvalidArgumentError("proposal.parents", f"{len(parents)} entries", f"{len(token_ids)}")
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise InvalidArgumentError(f"proposal.parents[{node}]", parent, f"-1 to {node - 1}")
    distributions = tuple(_distribution(d, vocab_size) for d in message.draft_distributions) or None
    if distributions is not None and len(distributions) != len(token_ids):
        raise InvalidArgumentError("proposal.draft_distributions", len(distributions), f"{len(token_ids)}")
    return Proposal(token_ids, parents, distributions, message.version)


def _distribution(message: pb.SparseDistribution, vocab_size: int) -> SparseDistribution:
    name = "proposal.draft_distributions"
    ids, weights, bits = tuple(message.token_ids), tuple(message.weights), message.weight_bits
    if not 1 <= bits <= 24:
        raise InvalidArgumentError(f"{name}.weight_bits", bits, "1 to 24")
    if len(ids) > MAX_SUPPORT:
        raise InvalidArgumentError(f"{name}.token_ids", f"{len(ids)} ids", f"at most {MAX_SUPPORT}")
    if len(ids) != len(weights) or len(set(ids)) != len(ids) or any(i >= vocab_size for i in ids):
        raise InvalidArgumentError(
            f"{name}.token_ids", f"{len(ids)} ids", f"distinct ids below {vocab_size}, one per weight"
        )
    if min(weights, default=0) < 1 or sum(weights) != 1 << bits:
        raise InvalidArgumentError(
            f"{name}.weights", f"a sum of {sum(weights)}", f"positive weights with sum {1 << bits}"
        )
    return SparseDistribution(ids, weights, bits)


def fill_verdict(message: target_pb.Verdict, verdict: Verdict) -> None:
    """Write a verdict, without its timing, into an empty message."""
    message.accepted_path.extend(verdict.accepted_path)
    message.next_token_id = verdict.next_token_id
    message.next_origin = ORIGINS[verdict.next_origin]
    message.num_tested = verdict.num_tested
    add_logprobs(message.logprobs, verdict.logprobs)
    if verdict.prompt_logprobs is not None:
        fill_prompt_logprobs(message.prompt_logprobs, verdict.prompt_logprobs, has_token_ids=False)


def add_logprobs(field: Any, entries: Iterable[TokenLogprobs]) -> None:
    """Add log-probabilities to a repeated field of a message."""
    for entry in entries:
        field.add(
            logprob=entry.logprob,
            top_token_ids=[token_id for token_id, _ in entry.top],
            top_logprobs=[logprob for _, logprob in entry.top],
        )


def verdict_from_proto(result: target_pb.VerifyResult, vocab_size: int, *, has_logprobs: bool) -> Verdict:
    """Return the verdict of an answer, less the prompt's log-probabilities; InternalError if malformed."""
    message = result.verdict
    if message.next_token_id >= vocab_size:
        raise InternalError(f"the peer sent token {message.next_token_id}, allowed: below {vocab_size}")
    return Verdict(
        accepted_path=tuple(message.accepted_path),
        next_token_id=message.next_token_id,
        next_origin=origin_from_proto(message.next_origin),
        drafted=_drafted(result, vocab_size),
        num_tested=message.num_tested,
        logprobs=tuple(_logprobs(entry, vocab_size) for entry in message.logprobs) if has_logprobs else (),
        timing=_timing(result.timing),
    )


def ahead_from_proto(message: target_pb.AheadTokens, vocab_size: int, *, has_logprobs: bool) -> Verdict:
    """Return tokens decoded ahead as the verdict of an empty proposal; InternalError if malformed."""
    token_ids = tuple(message.token_ids)
    if not token_ids or max(token_ids) >= vocab_size:
        raise InternalError(f"the peer sent tokens {token_ids[:8]}, allowed: one or more below {vocab_size}")
    return Verdict(
        accepted_path=(),
        next_token_id=token_ids[0],
        next_origin=TokenOrigin.BONUS,
        num_tested=0,
        logprobs=tuple(_logprobs(entry, vocab_size) for entry in message.logprobs) if has_logprobs else (),
        further_token_ids=token_ids[1:],
        ahead_s=0.0,
        timing=_timing(message.timing),
    )


def _timing(message: pb.WorkerTiming) -> VerifyTiming | None:
    if message.batch_tokens == 0:
        return None
    return VerifyTiming(
        message.queue_us * 1e-6,
        message.compute_us * 1e-6,
        message.batch_size,
        message.batch_tokens,
        message.batch_rows,
    )


def _drafted(result: target_pb.VerifyResult, vocab_size: int) -> Proposal | None:
    if not result.HasField("drafted"):
        return None
    try:
        return replace(proposal_from_proto(result.drafted, vocab_size), is_prepared=result.is_prepared)
    except InvalidArgumentError as error:
        raise InternalError(f"the peer sent an invalid proposal: {error}") from None


def _logprobs(message: target_pb.TokenLogprobs, vocab_size: int) -> TokenLogprobs:
    if (
        len(message.top_token_ids) != len(message.top_logprobs)
        or math.isnan(message.logprob)
        or any(map(math.isnan, message.top_logprobs))
        or any(token_id >= vocab_size for token_id in message.top_token_ids)
    ):
        raise InternalError("the peer sent invalid log-probabilities")
    return TokenLogprobs(
        message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    )


def fill_prompt_logprobs(
    message: pb.PromptLogprobs, prompt: PromptLogprobs, *, has_token_ids: bool = True
) -> None:
    """Write log-probabilities of a prompt into an empty message, with or without its token ids."""
    message.SetInParent()
    message.num_top = prompt.num_top
    if has_token_ids:
        _extend(message.token_ids, prompt.token_ids)
    for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs"):
        _extend(getattr(message, name), getattr(prompt, name))


def _extend(column: Any, values: Sequence[float]) -> None:
    for start in range(0, len(values), _SLICE):  # in slices, as each call holds the GIL
        column.extend(values[start : start + _SLICE])


def prompt_logprobs_from_proto(message: pb.PromptLogprobs, token_ids: tuple[int, ...]) -> PromptLogprobs:
    """Return the log-probabilities of a prompt; InternalError if the columns do not match it."""
    found = PromptLogprobs(
        token_ids,
        tuple(message.logprobs),
        tuple(message.ranks),
        message.num_top,
        tuple(message.top_token_ids),
        tuple(message.top_logprobs),
    )
    entries = max(0, len(token_ids) - 1)
    sizes = [len(found.logprobs), len(found.ranks), len(found.top_token_ids), len(found.top_logprobs)]
    if sizes != [entries, entries, entries * found.num_top, entries * found.num_top]:
        raise InternalError(f"the peer sent {sizes} log-probabilities of a prompt of {len(token_ids)} tokens")
    if any(map(math.isnan, found.logprobs)) or any(map(math.isnan, found.top_logprobs)):
        raise InternalError("the peer sent log-probabilities of a prompt that are not numbers")
    return found
