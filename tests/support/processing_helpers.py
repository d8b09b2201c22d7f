"""Processing of logits to distributions for one cycle, and a slow, simple oracle of its first half."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gammaray.types import Proposal, SamplingParams
from services.engine.sampling.edits import LogitEdits, row_paths
from services.engine.sampling.logits import processed_log_probs


def processed(
    logits: Tensor,
    params: SamplingParams,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    proposal: Proposal,
    eos_token_ids: Sequence[int],
) -> Tensor:
    """Process the rows of a proposal as a session's first cycle does."""
    edits = None
    if LogitEdits.needed(params):
        edits = LogitEdits(params, eos_token_ids, len(prompt), logits.shape[-1])
        edits.follow([*prompt, *output])
    return processed_log_probs(logits, params, edits, row_paths(proposal))


def path_of(proposal: Proposal, row: int) -> list[int]:
    """Return the tokens from the root to a row, one parent at a time."""
    tokens = []
    while row > 0:
        node = row - 1
        tokens.insert(0, proposal.token_ids[node])
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        row = parent + 1
    return tokens


def edited_row(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos: Sequence[int]
) -> Tensor:
    """Edit one row [vocab_size] from Python lists, in float32; `output` ends with the row's own path."""
    row = logits.float().clone()
    for token_id in range(len(row)):
        not_allowed = params.allowed_token_ids and token_id not in params.allowed_token_ids
        too_early = token_id in eos and len(output) < params.min_tokens
        if not_allowed or token_id in params.banned_token_ids or too_early:
            row[token_id] = -math.inf
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    if params.repetition_penalty != 1:
        for token_id in {*prompt, *output}:
            if row[token_id] > 0:
                row[token_id] /= params.repetition_penalty
            else:
                row[token_id] *= params.repetition_penalty
            row[token_id].clamp_(max=1e8)
    for token_id in set(output):
        row[token_id] -= torch.tensor(float(output.count(token_id))) * params.frequency_penalty
        row[token_id] -= params.presence_penalty
    return row
