"""A block's verdict from the logits of its rows, the same whatever engine computed them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gammaray.blocks import TokenLogprobs, Verdict
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import Proposal, VerificationMethod
from services.engine.sampling.edits import LogitEdits, row_paths
from services.engine.sampling.logits import edited_logits, processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.tasks import SessionSpec
from services.verification.rules import cut_before, verify


def judge(
    spec: SessionSpec,
    proposal: Proposal,
    logits: Tensor,
    base_position: int,
    noise: Noise | None,
    edits: LogitEdits | None,
) -> Verdict:
    """Verify a proposal, a chain or tree that is not trusted, as `verify` does, from the target's logits.

    Args:
        logits: [len(proposal) + 1, vocab_size].
        edits: The session's edits, up to the committed tokens; None if its parameters need none.

    Raises:
        InvalidArgumentError: Masks leave no token, or what `verify` raises it for.
        InternalError: As `verify`.
    """
    params = spec.params
    paths = [] if edits is None else row_paths(proposal)
    # At temperature 0 only the order of the logits counts.
    if params.temperature > 0:
        is_normalised = spec.method is not VerificationMethod.COUPLED
        log_probs = processed_log_probs(logits, params, edits, paths, is_normalised=is_normalised)
    else:
        log_probs = edited_logits(logits, edits, paths)
    try:
        verdict = verify(spec.method, log_probs, proposal, params, noise, base_position)
    except InternalError:
        if edits is None or not edits.empty_rows:
            raise
        allowed = "masks and biases that leave a token of the grammar"
        raise InvalidArgumentError("grammar", "no possible token", allowed) from None
    return verdict if edits is None else cut_before(verdict, proposal, edits.unmasked_rows)


def token_logprobs(logits: Tensor, emitted: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of `emitted[i]` under `logits[i]`, [len(emitted), vocab_size]."""
    log_probs = logits.double().log_softmax(-1)
    top = log_probs.topk(min(num_top, log_probs.shape[-1]))
    return tuple(
        TokenLogprobs(row[token_id].item(), tuple(zip(token_ids, values, strict=True)))
        for row, token_id, token_ids, values in zip(
            log_probs, emitted, top.indices.tolist(), top.values.tolist(), strict=True
        )
    )
