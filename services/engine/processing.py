"""The processed distribution: what the target samples from, and so what speculation must not change.

Draft and target, plain and speculative decoding all go through `processed_log_probs`. The order is pinned,
since changing it changes the law: allow and ban masks and `min_tokens`, logit bias, repetition penalty
(prompt and output), frequency and presence penalties (output only), temperature, min-p, top-k, top-p,
softmax. Tokens on a node's own path count as output, so that row r is right for exactly the continuations
in which it is consulted.

Each row is a function of its own logits and path alone: no reduction crosses rows, and the order in which a
row is summed does not depend on how many there are. Hence the tokens do not depend on gamma.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal, SamplingParams

__all__ = ["edited_logits", "has_edits", "processed_log_probs"]

# A temperature this small divides any logits difference out of reach; smaller ones would divide 0 by 0.
_MIN_TEMPERATURE = 1e-30
_MAX_LOGIT = 1e8
# Probabilities are summed as integers, which is exact and therefore independent of the order of summation.
_MASS_UNIT = 2.0**40
_USUAL_NUCLEUS = 256


def processed_log_probs(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    proposal: Proposal,
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Return the log-probabilities that tokens are drawn from.

    A draft has one row at a time: it counts what it drafted as output, beside an empty proposal.

    Args:
        logits: [len(proposal) + 1, vocab_size]; row 0 follows the committed tokens, row i + 1 follows node i.
            Not changed.
        params: Sampling parameters, validated against the vocabulary.
        prompt: Committed tokens that count as prompt.
        output: Committed tokens after the prompt.
        proposal: The nodes behind rows 1 and up.
        eos_token_ids: Tokens masked until `params.min_tokens` tokens were produced.

    Returns:
        [len(proposal) + 1, vocab_size] float32, -inf for tokens that cannot be drawn. At temperature 0: 0
        at the argmax (lowest id on ties), -inf elsewhere.

    Raises:
        InvalidArgumentError: The masks leave no token. It does not depend on the position: masks that would
            leave none while `min_tokens` holds are refused from the start.
    """
    logits = edited_logits(
        logits, params, prompt=prompt, output=output, proposal=proposal, eos_token_ids=eos_token_ids
    )
    if params.temperature == 0:
        return _point_mass(logits)
    if params.temperature != 1:
        logits = logits / max(params.temperature, _MIN_TEMPERATURE)
    if params.min_p > 0:
        logits = _keep_min_p(logits, params.min_p)
    if 0 < params.top_k < logits.shape[-1]:
        logits = _keep_top_k(logits, params.top_k)
    if params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    return logits.log_softmax(dim=-1)


def edited_logits(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    proposal: Proposal,
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Return the logits after masks, bias and penalties, the first half of `processed_log_probs`.

    At temperature 0 their best token, the lowest id on ties, is all that counts.
    """
    logits = logits.float()
    if has_edits(params):
        logits = logits.clone()
        _apply_masks(logits, params, len(output), proposal, eos_token_ids)
        _apply_bias(logits, params)
        _apply_penalties(logits, params, prompt, output, proposal)
    return logits


def has_edits(params: SamplingParams) -> bool:
    """Return whether logits depend on the tokens before them, or on masks or bias; else both are unused."""
    return bool(
        params.allowed_token_ids
        or params.banned_token_ids
        or params.min_tokens
        or params.logit_bias
        or params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
    )


def _apply_masks(
    logits: Tensor,
    params: SamplingParams,
    num_output: int,
    proposal: Proposal,
    eos_token_ids: Sequence[int],
) -> None:
    if not (params.allowed_token_ids or params.banned_token_ids or params.min_tokens):
        return
    num_rows, vocab_size = logits.shape
    masked = torch.zeros(vocab_size, dtype=torch.bool, device=logits.device)
    if params.allowed_token_ids:
        masked.fill_(True)
        masked[_ids(params.allowed_token_ids, logits)] = False
    if params.banned_token_ids:
        masked[_ids(params.banned_token_ids, logits)] = True
    eos = _ids(tuple(eos_token_ids), logits) if params.min_tokens else None
    _check_some_token_left(masked, eos)
    logits.masked_fill_(masked, -torch.inf)
    if eos is not None:
        for row, depth in enumerate((0, *_depths(proposal))[:num_rows]):
            if num_output + depth < params.min_tokens:
                logits[row, eos] = -torch.inf


def _check_some_token_left(masked: Tensor, eos: Tensor | None) -> None:
    if eos is not None:
        masked = masked.clone()
        masked[eos] = True
    if bool(masked.all()):
        raise InvalidArgumentError(
            "allowed_token_ids, banned_token_ids and min_tokens",
            "masks of the whole vocabulary",
            "masks that leave a token (other than end of sequence while min_tokens holds)",
        )


def _apply_bias(logits: Tensor, params: SamplingParams) -> None:
    if params.logit_bias:
        bias = torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[:, _ids(tuple(params.logit_bias), logits)] += bias


def _apply_penalties(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], proposal: Proposal
) -> None:
    if params.repetition_penalty == 1 and not params.frequency_penalty and not params.presence_penalty:
        return
    counts = _output_counts(logits, output, proposal)
    if params.repetition_penalty != 1:
        seen = counts > 0
        seen[:, _ids(tuple(prompt), logits)] = True
        penalised = torch.where(
            logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty
        )
        logits.copy_(torch.where(seen, penalised.clamp(max=_MAX_LOGIT), logits))
    if params.frequency_penalty:
        logits.sub_(counts * params.frequency_penalty)
    if params.presence_penalty:
        logits.sub_((counts > 0) * params.presence_penalty)


def _output_counts(logits: Tensor, output: Sequence[int], proposal: Proposal) -> Tensor:
    """Return [rows, vocab_size] float32: occurrences in the output and on the row's own path."""
    num_rows, vocab_size = logits.shape
    committed = torch.bincount(torch.tensor(tuple(output), dtype=torch.int64), minlength=vocab_size)
    counts = committed.to(logits).repeat(num_rows, 1)
    for node, token_id in enumerate(proposal.token_ids):
        # A node's row starts as its parent's row, already complete, plus the node's token.
        if proposal.parents is None:
            counts[node + 1 :, token_id] += 1
        else:
            counts[node + 1] = counts[proposal.parents[node] + 1]
            counts[node + 1, token_id] += 1
    return counts


def _point_mass(logits: Tensor) -> Tensor:
    best, token_ids = logits.max(dim=-1, keepdim=True)
    # 0, but not a number where the best logit is none: a broken model must not pass for a certain one.
    return torch.full_like(logits, -torch.inf).scatter_(-1, token_ids, best - best)


def _keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    return logits.masked_fill(weights < min_p, -torch.inf)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    last = logits.topk(top_k, dim=-1).values[:, -1:]
    num_ties = top_k - (logits > last).sum(dim=-1, keepdim=True)
    return _keep_down_to(logits, last, num_ties)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Keep the most likely tokens, up to and with the one at which their mass reaches `top_p`."""
    most = logits.amax(dim=-1, keepdim=True)
    needed = _mass(logits, most).sum(dim=-1, keepdim=True).double() * top_p
    size = min(_USUAL_NUCLEUS, logits.shape[-1])
    ordered = logits.topk(size, dim=-1).values
    num_kept = _num_within(ordered, most, needed)
    if size < logits.shape[-1] and int(num_kept.max()) == size:
        ordered = _descending(logits)
        num_kept = _num_within(ordered, most, needed)
    last = ordered.gather(-1, num_kept - 1)
    num_ties = num_kept - (logits > last).sum(dim=-1, keepdim=True)
    return _keep_down_to(logits, last, num_ties)


def _descending(logits: Tensor) -> Tensor:
    if logits.device.type != "cpu":
        return logits.sort(dim=-1, descending=True).values
    # NOTE: numpy's vectorised sort takes a sixth of torch's time, which also orders the ids.
    return torch.from_numpy(np.sort(logits.numpy(), axis=-1)).flip(-1)


def _num_within(ordered: Tensor, most: Tensor, needed: Tensor) -> Tensor:
    """Return [rows, 1]: of tokens in descending order, how many have less than `needed` before them."""
    mass = _mass(ordered, most)
    # At least one, also where the logits are not numbers: whoever consults the row will find out.
    return ((mass.cumsum(dim=-1) - mass).double() < needed).sum(dim=-1, keepdim=True).clamp(min=1)


def _mass(logits: Tensor, most: Tensor) -> Tensor:
    """Return int64 weights proportional to probabilities; `most` is the largest logit of each row."""
    return ((logits - most).exp().double() * _MASS_UNIT).round_().long()


def _keep_down_to(logits: Tensor, last: Tensor, num_ties: Tensor) -> Tensor:
    """Keep logits above `last` and, among those equal to it, the `num_ties` of lowest id; all [rows, 1]."""
    ties = logits == last
    kept = (logits > last) | (ties & (ties.cumsum(dim=-1) <= num_ties))
    return logits.masked_fill(~kept, -torch.inf)


def _depths(proposal: Proposal) -> list[int]:
    """Return how many tokens end at each node, the node's own included."""
    if proposal.parents is None:
        return list(range(1, len(proposal) + 1))
    depths: list[int] = []
    for parent in proposal.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _ids(token_ids: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=like.device)
