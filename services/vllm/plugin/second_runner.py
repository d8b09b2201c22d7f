"""The rule of `sampler` in vLLM's V2 model runner: drafts are kept while they equal the draws of their rows.

There vLLM draws a token with noise of (seed, position, token) already, so plain decoding stays as it is. Each
draft's row is drawn by the function that draws plainly, where vLLM tests a ratio of probabilities instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


def install(runner: Any) -> list[str]:
    """Replace what verifies and drafts in the process of a V2 model runner; return the names.

    It has to precede the loading of the model: CUDA graphs record how drafts are drawn.
    """
    RejectionSampler._verify = verify
    taken = ["RejectionSampler._verify"]
    config = runner.vllm_config.speculative_config
    if config is not None and config.draft_sample_method == "greedy":
        DraftModelSpeculator.sample_draft = sample_draft
        taken.append("DraftModelSpeculator.sample_draft")
    return taken


def verify(
    self: RejectionSampler,
    logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: Any,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: Any,
    verify_draft_sampled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw every row as `Sampler.sample` does, and keep drafts while they equal the draws.

    Returns:
        The processed logits [rows, vocab_size], tokens [requests, drafts + 1] and their number [requests].
    """
    sampler, states = self.sampler, self.sampler.sampling_states
    processed = sampler.apply_sampling_params(
        logits,
        expanded_idx_mapping,
        idx_mapping,
        idx_mapping_np,
        pos,
        draft_sampled,
        expanded_local_pos,
        seq_lens_upper_bound_np,
    )
    drawn = gumbel_sample(
        processed,
        expanded_idx_mapping,
        states.temperature.gpu,
        states.seeds.gpu,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )
    tokens, counts = kept(drawn, verify_draft_sampled, cu_num_logits, self.num_speculative_steps)
    return processed, tokens, counts


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
    self: DraftModelSpeculator,
    hidden_states: Tensor,
    sample_src_positions: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
) -> Tensor:
    """Draft with the noise of the positions, in place of the argmax of a drafter's logits.

    The target's token is the argmax of its own scores with the same noise, so that a drafter that knows the
    distribution finds it more often than by its most likely token.
    """
    drafted: Tensor
    if self.use_local_argmax_reduction:
        drafted = self.get_draft_top_tokens(hidden_states, spec_step_idx)
        return drafted
    logits = self.compute_draft_logits(hidden_states, spec_step_idx)
    drafted = gumbel_sample(
        logits,
        idx_mapping,
        temperature,
        seeds,
        sample_src_positions,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=self.use_fp64_gumbel,
    )
    self._maybe_predict_acceptance(logits, idx_mapping, draft_step)
    return drafted
