"""The rule of `sampler` in vLLM's V2 model runner: drafts are kept while they equal the draws of their rows.

There vLLM draws a token with noise of (seed, position, token) already, so plain decoding stays as it is. Each
draft's row is drawn by the function that draws plainly, where vLLM tests a ratio of probabilities instead.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode import rejection_sampler, speculator

_NOISE_OF_TARGET: dict[str, Any] = (
    {"is_drafting": False} if "is_drafting" in inspect.signature(gumbel_sample).parameters else {}
)
"""Up to vLLM 0.28 drafts and targets have the same noise."""

_SAMPLE_DRAFT = speculator.DraftModelSpeculator.sample_draft


def install(runner: Any) -> list[str]:
    """Replace what verifies and drafts in the process of a V2 model runner; return the names.

    It has to precede the loading of the model: CUDA graphs record how drafts are drawn.
    """
    rejection_sampler.rejection_sample = verify
    taken = ["rejection_sample"]
    config = runner.vllm_config.speculative_config
    if config is not None and config.draft_sample_method == "greedy":
        speculator.DraftModelSpeculator.sample_draft = sample_draft
        speculator.gumbel_sample = draw_draft
        taken.append("DraftModelSpeculator.sample_draft")
    return taken


def verify(
    processed: Tensor,
    draft_logits: Tensor | None,
    drafts: Tensor,
    ends: Tensor,
    positions: Tensor,
    requests: Tensor,
    request_of_row: Tensor,
    place_of_row: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    most: int,
    *_rules: Any,
    use_fp64: bool,
    **_options: Any,
) -> tuple[Tensor, Tensor]:
    """Draw every row as `Sampler` does, and keep drafts while they equal the draws; for `rejection_sample`.

    Returns:
        Tokens [requests, drafts + 1] and their number [requests].
    """
    drawn = gumbel_sample(
        processed,
        request_of_row,
        temperature,
        seeds,
        positions,
        apply_temperature=False,
        use_fp64=use_fp64,
        **_NOISE_OF_TARGET,
    )
    return kept(drawn, drafts, ends, most)


def kept(drawn: Tensor, drafts: Tensor, ends: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that each request emits, and their number.

    Args:
        drawn: [rows], the draw after each row's token.
        drafts: [rows], each row's token: a request's first row has its last token, the others its drafts.
        ends: [requests + 1], where the rows of each request begin, and the end of the last.
        most: Upper bound of a request's drafts.

    Returns:
        [requests, most + 1], of which the first ones count, and [requests] int32.
    """
    columns = torch.arange(most + 1, device=drawn.device)
    rows = ends[:-1, None].long() + columns
    has_next = rows + 1 < ends[1:, None]
    last = len(drawn) - 1
    tokens = drawn[rows.clamp(max=last)]
    is_kept = has_next & (tokens == drafts[(rows + 1).clamp(max=last)])
    return tokens, 1 + is_kept.long().cumprod(dim=1).sum(dim=1, dtype=torch.int32)


def sample_draft(
    self: Any,
    hidden_states: Tensor,
    positions: Tensor,
    requests: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    *others: Any,
    **options: Any,
) -> Tensor:
    """Draft with the noise of the positions, in place of the argmax of a drafter's logits.

    The target's token is the argmax of its own scores with the same noise, so that a drafter that knows the
    distribution finds it more often than by its most likely token. vLLM's own function calls `gumbel_sample`,
    which is `draw_draft`, if it has a cache of logits, which `draw_draft` does not use.
    """
    cache = draft_logits if getattr(self, "use_local_argmax_reduction", False) else hidden_states
    drafted: Tensor = _SAMPLE_DRAFT(
        self, hidden_states, positions, requests, temperature, seeds, draft_step, cache, *others, **options
    )
    return drafted


def draw_draft(
    logits: Tensor,
    requests: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    use_fp64: bool,
    **_cache: Any,
) -> Tensor:
    """Draw drafts with the target's noise, where vLLM has other noise for them."""
    drawn: Tensor = gumbel_sample(
        logits,
        requests,
        temperature,
        seeds,
        positions,
        apply_temperature=True,
        use_fp64=use_fp64,
        **_NOISE_OF_TARGET,
    )
    return drawn
