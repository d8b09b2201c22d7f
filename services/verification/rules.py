"""Verification: which proposed tokens are accepted, and the target's next token.

Vocabulary. A *proposal* is a tree of tokens (a chain is the special case) that continues the committed
tokens. A node is *tested* when every node before it on its path was accepted; it is *accepted* when its
test passes. The first failed test ends the walk, and the target's own token there is the *correction*; when
nothing is left to test, the target's token is the *bonus*. Emitted = accepted path + correction or bonus:
always at least one token.

Row 0 of the log-probabilities follows the committed tokens and row i + 1 follows node i. The token decided by
row r has the absolute position base_position + depth of the row (0 for row 0), and is drawn with the noise of
that position.

Methods, all exact for the processed distribution p:

* coupled (arXiv 2408.07978): the target draws its own token, argmax(log p + gumbel), with noise that the
  draft knows as well; a node is accepted when it is that token. In a tree the walk follows these tokens.
* naive: the same walk with noise the draft does not know.
* rejection (arXiv 2211.17192, 2302.01318): a token y drawn from the shipped distribution q is accepted with
  probability min(1, p(y) / q(y)); else the correction is drawn from (p - q)+ with the full p. Chains only.
* block (arXiv 2403.10444): the tokens are tested together. The first i of them are all accepted with the
  carried probability c_i = min(1, c_{i-1} p(y_i) / q(y_i)), at least the product of their tests under
  rejection: a token that q underrates makes up for one that it overrates. The chain ends after the last token
  whose test passes, and the correction is drawn from (c p - q)+. Chains only.
* greedy: at temperature 0 all methods accept y while y = argmax p.

Trust. With coupled, naive and greedy verification the target draws its tokens independently of the proposal:
they are exact whatever a drafter sends, even if it is broken or hostile. Rejection and block are exact only
when each token was drawn from the distribution shipped with it, and when neither the drafter nor a deadline
selects proposals by the drawn tokens. A drafter that draws from a different distribution than it ships
changes the distribution of the text, and the target cannot detect this from single draws. Use these methods
only with drafters you run yourself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from gammaray.blocks import Verdict
from gammaray.errors import InternalError, InvalidArgumentError
from gammaray.types import Proposal, SamplingParams, SparseDistribution, TokenOrigin, VerificationMethod
from services.engine.core.batch import is_chain
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.edits import row_paths
from services.engine.sampling.noise import Noise


def verify(
    method: VerificationMethod,
    log_probs: Tensor,
    proposal: Proposal,
    params: SamplingParams,
    noise: Noise | None,
    base_position: int,
) -> Verdict:
    """Verify a proposal.

    Args:
        log_probs: [len(proposal) + 1, vocab_size] from `processed_log_probs`, which coupled verification does
            not need normalised; at temperature 0 `edited_logits` are sufficient.
        proposal: Validated by `gammaray.wire.blocks.proposal_from_proto`, but otherwise not trusted.
        noise: The session's noise; may be None at temperature 0.

    Raises:
        InvalidArgumentError: A tree with a method that supports chains only.
        InternalError: The target's log-probabilities are not numbers.
    """
    if method is not VerificationMethod.COUPLED and not is_chain(proposal.parents):
        raise InvalidArgumentError("proposal.parents", "a tree", f"a chain with {method.value} verification")
    if params.temperature == 0:
        return walk(best_tokens(log_probs), proposal)
    assert noise is not None, "sampling needs noise"
    if method is VerificationMethod.REJECTION:
        return _verify_rejection(log_probs, proposal, noise, base_position)
    if method is VerificationMethod.BLOCK:
        return _verify_block(log_probs, proposal, noise, base_position)
    if method is VerificationMethod.COUPLED:
        positions = [base_position + depth for depth in row_depths(proposal)]
        return walk(noise.draw(log_probs, positions)[0], proposal)
    rows = noise.independent_gumbel(base_position, len(proposal) + 1)
    return walk(best_tokens(log_probs + rows), proposal)


def walk(target_token_ids: Sequence[int | None], proposal: Proposal) -> Verdict:
    """Follow the target's own token of each row, [len(proposal) + 1], as long as the proposal contains it."""
    row, path = 0, list[int]()
    while True:
        token_id, children = _checked(target_token_ids[row]), children_of(proposal, row)
        node = next((node for node in children if proposal.token_ids[node] == token_id), None)
        if node is None:
            return make_verdict(path, token_id, failed=bool(children))
        path.append(node)
        row = node + 1


def cut_before(verdict: Verdict, proposal: Proposal, rows: Collection[int]) -> Verdict:
    """Return a verdict that takes no token from `rows`, whose log-probabilities are not the target's.

    It ends with the accepted token before such a row. Where it ends depends on emitted tokens alone, so that
    all methods stay exact.
    """
    path = verdict.accepted_path
    at = next((at for at, node in enumerate(path) if node + 1 in rows), None)
    if at is None:
        return verdict
    return make_verdict(list(path[:at]), proposal.token_ids[path[at]], failed=False)


def _verify_rejection(log_probs: Tensor, proposal: Proposal, noise: Noise, base_position: int) -> Verdict:
    num_rows = len(proposal) + 1
    tokens = torch.tensor(proposal.token_ids, dtype=torch.int64, device=log_probs.device)
    token_log_probs = log_probs[: num_rows - 1].gather(1, tokens[:, None]).flatten().tolist()
    for node, log_prob in enumerate(token_log_probs):
        position = base_position + node
        draft = _draft_distribution(proposal, node)
        weight = weight_of(draft, proposal.token_ids[node])
        if not is_accepted(noise.accept_uniform(position), math.exp(log_prob), weight, draft.weight_bits):
            # A token outside the shipped support was not drawn from q: ignore q, since p alone is exact.
            row = log_probs[node]
            distribution = residual_distribution(row, draft) if weight else row.double().exp()
            token_id = _draw(distribution, noise, position)
            return make_verdict(list(range(node)), token_id, failed=True)
    bonus = _draw(log_probs[-1].double().exp(), noise, base_position + num_rows - 1)
    return make_verdict(list(range(num_rows - 1)), bonus, failed=False)


def _verify_block(log_probs: Tensor, proposal: Proposal, noise: Noise, base_position: int) -> Verdict:
    drafts = _believable(proposal)
    tokens = torch.tensor(proposal.token_ids[: len(drafts)], dtype=torch.int64, device=log_probs.device)
    token_log_probs = log_probs[: len(drafts)].gather(1, tokens[:, None]).flatten().tolist()
    carried = [1.0]
    for node, draft in enumerate(drafts):
        weight = weight_of(draft, proposal.token_ids[node])
        carried.append(carry(carried[-1], math.exp(token_log_probs[node]), weight, draft.weight_bits))
        if carried[-1] == 0:
            break  # this token cannot be emitted, nor anything after it
    rows = range(1, min(len(carried), len(drafts)))
    excesses = [excess_distribution(log_probs[row], drafts[row], carried[row]).sum() for row in rows]
    masses = torch.stack(excesses).tolist() if excesses else []
    thresholds = [block_threshold(c, _finite(mass)) for c, mass in zip(carried[1:], masses, strict=False)]
    thresholds += carried[1 + len(thresholds) :]
    tested = range(base_position, base_position + len(thresholds))
    kept = last_passed([noise.accept_uniform(position, base_position) for position in tested], thresholds)
    if kept < len(drafts):
        distribution = residual_distribution(log_probs[kept], drafts[kept], carried[kept])
    else:
        distribution = log_probs[kept].double().exp()
    token_id = _draw(distribution, noise, base_position + kept)
    return make_verdict(list(range(kept)), token_id, failed=kept < len(proposal))


def _believable(proposal: Proposal) -> list[SparseDistribution]:
    """Return the draft distributions before the first token outside its own: the chain ends there."""
    drafts = list[SparseDistribution]()
    for node, token_id in enumerate(proposal.token_ids):
        draft = _draft_distribution(proposal, node)
        if weight_of(draft, token_id) == 0:
            break
        drafts.append(draft)
    return drafts


def carry(carried: float, target_prob: float, weight: int, weight_bits: int) -> float:
    """Return min(1, c p / q), q = weight / 2^bits: the carried probability with one more token."""
    return min(1.0, carried * math.ldexp(_finite(target_prob), weight_bits) / weight)


def last_passed(uniforms: Sequence[float], thresholds: Sequence[float]) -> int:
    """Return the number of tokens up to the last one whose test passes; one may fail before it."""
    passed = [node for node, (u, h) in enumerate(zip(uniforms, thresholds, strict=True), 1) if u < h]
    return passed[-1] if passed else 0


def block_threshold(carried: float, excess: float) -> float:
    """Return the probability that the test of a token before the last one passes.

    `carried` is the carried probability c of the tokens up to this one, `excess` the mass of (c p - q)+ at
    the next token.
    """
    failing = 1.0 - carried
    # 0 / 0: p = q from here on, and the last token's test decides alike.
    return excess / (excess + failing) if excess + failing > 0 else 1.0


def _draft_distribution(proposal: Proposal, node: int) -> SparseDistribution:
    """Return the distribution that a node's token was drawn from; without one, all mass is on that token."""
    if proposal.draft_distributions is None:
        return SparseDistribution((proposal.token_ids[node],), (1,), 0)
    return proposal.draft_distributions[node]


def weight_of(draft: SparseDistribution, token_id: int) -> int:
    """Return the weight of a token in a shipped distribution; 0 when it is not in the support."""
    return draft.weights[draft.token_ids.index(token_id)] if token_id in draft.token_ids else 0


def is_accepted(uniform: float, target_prob: float, weight: int, weight_bits: int) -> bool:
    """Return u < p / q, q = weight / 2^bits, exactly: u is a multiple of 2^-33, scaling p by 2^n is exact."""
    return weight > 0 and int(uniform * 2**33) * weight < math.ldexp(target_prob, 33 + weight_bits)


def excess_distribution(log_probs_row: Tensor, draft: SparseDistribution, scale: float = 1.0) -> Tensor:
    """Return the unnormalised (scale * p - q)+ over the whole vocabulary, [vocab_size] float64."""
    excess = scale * log_probs_row.double().exp()
    support = torch.tensor(draft.token_ids, dtype=torch.int64, device=excess.device)
    weights = torch.tensor(draft.weights, dtype=torch.float64, device=excess.device)
    excess[support] = (excess[support] - weights * 2.0**-draft.weight_bits).clamp(min=0)
    return excess


def residual_distribution(log_probs_row: Tensor, draft: SparseDistribution, scale: float = 1.0) -> Tensor:
    """Return what a correction is drawn from, unnormalised: `excess_distribution`, or p where that is empty.

    It is empty where scale * p = q up to rounding. The test then fails with probability 0, so that any
    distribution is exact.
    """
    excess = excess_distribution(log_probs_row, draft, scale)
    return excess if bool(excess.any()) else log_probs_row.double().exp()


def _draw(weights: Tensor, noise: Noise, position: int) -> int:
    """Draw from unnormalised probabilities [vocab_size], with the noise for corrections and bonus tokens."""
    scores = weights.log() + noise.residual_gumbel(position)
    return _checked(best_tokens(scores[None])[0])


def _finite(prob: float) -> float:
    if not math.isfinite(prob):
        raise InternalError("the target model's logits are not finite numbers")
    return prob


def _checked(token_id: int | None) -> int:
    # Only rows that the walk reaches are checked: nodes of a bad draft must not affect the outcome.
    if token_id is None:
        raise InternalError("the target model's logits are not finite numbers")
    return token_id


def make_verdict(path: Sequence[int], token_id: int, *, failed: bool) -> Verdict:
    """Return the verdict that accepts `path`; the target's token is a correction if a test failed."""
    origin = TokenOrigin.CORRECTION if failed else TokenOrigin.BONUS
    return Verdict(tuple(path), token_id, origin, len(path) + failed)


def children_of(proposal: Proposal, row: int) -> list[int]:
    if proposal.parents is None:
        return [row] if row < len(proposal) else []
    return [node for node, parent in enumerate(proposal.parents) if parent == row - 1]


def row_depths(proposal: Proposal) -> Sequence[int]:
    """Return the number of proposed tokens before each row's own token, [len(proposal) + 1]."""
    if proposal.parents is None:
        return range(len(proposal) + 1)
    return [len(path) for path in row_paths(proposal)]
