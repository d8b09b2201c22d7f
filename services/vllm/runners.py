"""The samplers in vLLM's model runners: V1, and V2, which `VLLM_USE_V2_MODEL_RUNNER=1` selects.

V2 has run here on CPUs only, with Triton's kernels interpreted; no GPU has run it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1 import outputs
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from services.vllm.block_scheduler import NoProposer
from services.vllm.heads import CoupledDrafts
from services.vllm.sampler import NO_TOKEN, BlockSampler, StepSampler, gather_logprobs


class FirstRunner:
    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def install(self, sampler: StepSampler) -> None:
        """Replace the runner's sampling; it has loaded its model."""
        runner = self._runner
        runner._sample = partial(self._sample, sampler)
        runner.sampler.gather_logprobs = gather_logprobs
        if runner.lora_config:
            runner._get_prompt_logprobs_dict = partial(self._score_prompts, runner._get_prompt_logprobs_dict)
        if isinstance(sampler, BlockSampler) and not isinstance(runner.drafter, NoProposer):
            CoupledDrafts(runner.drafter, sampler).install()

    def begin(self, step: Any) -> None:
        """Prepare for a step; one that failed between the forward and the sampling has left its state."""
        self._runner.execute_model_state = None

    def tokens(self, request_id: str, length: int) -> list[int]:
        batch = self._runner.input_batch
        tokens: list[int] = batch.token_ids_cpu[batch.req_id_to_index[request_id], :length].tolist()
        return tokens

    def _sample(
        self, sampler: StepSampler, logits: Tensor, spec_decode_metadata: Any
    ) -> outputs.SamplerOutput:
        """Sample in place of `GPUModelRunner._sample`."""
        batch = self._runner.input_batch
        count = batch.num_reqs
        drafts = [0] * count if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        tokens = sampler.sample(logits, batch.req_ids[:count], drafts)
        return outputs.SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=None)

    def _score_prompts(self, score: Callable[..., dict[str, Any]], *step: Any) -> dict[str, Any]:
        """Score each prompt with its request's adapter: vLLM has one adapter per row that is sampled from."""
        runner, asked, scores = self._runner, self._runner.num_prompt_logprobs, dict[str, Any]()
        batch, compute = runner.input_batch, runner.model.compute_logits
        for request_id in list(asked):

            def compute_with_adapter(rows: Any, request_id: str = request_id) -> Any:
                number = int(batch.request_lora_mapping[batch.req_id_to_index[request_id]])
                mapping = (number,) * len(rows)
                runner._set_active_loras(mapping, mapping, set(batch.lora_id_to_lora_request.values()))
                return compute(rows)

            runner.num_prompt_logprobs = {request_id: asked[request_id]}
            runner.model.compute_logits = compute_with_adapter
            try:
                scores |= score(*step)
            finally:
                if not runner.num_prompt_logprobs:  # the prompt is complete
                    del asked[request_id]
                runner.num_prompt_logprobs = asked
                del runner.model.compute_logits
        return scores


class SecondRunner:
    """A model runner of V2, which has its requests' tokens and drafts on the device."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def install(self, sampler: StepSampler) -> None:
        """Replace the runner's sampling, and its drafter; it has loaded its model."""
        runner = self._runner
        runner.sample = partial(self._sample, sampler)
        self._has_drafter = isinstance(runner.speculator, DraftModelSpeculator)
        if isinstance(sampler, BlockSampler) and self._has_drafter:
            CoupledDrafts(runner.speculator, sampler).install_second()
        elif runner.speculator is not None:
            runner.speculator.propose = self._propose
        if runner.lora_config:
            scorer = runner.prompt_logprobs_worker
            scorer.compute_prompt_logprobs = partial(self._score_prompts, scorer.compute_prompt_logprobs)

    def begin(self, step: Any) -> None:
        """Prepare for a step: write the proposals, of which vLLM's `SchedulerOutput` has a copy."""
        step.has_structured_output_requests = self._has_drafter  # else drafts stay on the device
        states, proposals = self._runner.req_states, step.scheduled_spec_decode_tokens
        if proposals:
            most = states.num_speculative_steps
            tokens = [each + [0] * (most - len(each)) for each in proposals.values()]
            rows = [states.req_id_to_index[request_id] for request_id in proposals]
            states.draft_tokens[rows] = torch.tensor(tokens, device=states.device)

    def tokens(self, request_id: str, length: int) -> list[int]:
        states = self._runner.req_states
        row = states.all_token_ids.gpu[states.req_id_to_index[request_id], :length]
        tokens: list[int] = row.tolist()
        return tokens

    def _sample(
        self, sampler: StepSampler, hidden_states: Tensor, batch: Any, grammar_output: None
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Sample in place of `GPUModelRunner.sample`."""
        if self._runner.lora_config:
            # vLLM has an adapter for each request, not for each of its rows.
            self._use_adapters(batch, self._adapters(batch).repeat(np.diff(batch.cu_num_logits_np)))
        logits = self._runner.model.compute_logits(hidden_states[batch.logits_indices])
        drafts = batch.num_draft_tokens_per_req
        counts = [0] * batch.num_reqs if drafts is None else drafts.tolist()
        tokens = sampler.sample(logits, batch.req_ids, counts).long()
        num_sampled = (tokens != NO_TOKEN).sum(dim=1, dtype=torch.int32)
        # Of a chunk of a prompt nothing is sampled, and nothing rejected.
        num_rejected = (batch.cu_num_logits.diff() - num_sampled) * (num_sampled > 0)
        return SamplerOutput(tokens, None, None, num_sampled, num_rejected), num_sampled, num_rejected

    def _adapters(self, batch: Any) -> np.ndarray:
        """Return the number of each request's adapter."""
        numbers: np.ndarray = self._runner.lora_state.lora_ids[batch.idx_mapping_np]
        return numbers

    def _use_adapters(self, batch: Any, rows: np.ndarray) -> None:
        """Let logits be computed with the adapters of these numbers, one per row."""
        runner, numbers = self._runner, tuple(rows)
        runner._set_active_loras(numbers, numbers, runner.lora_state.get_activate_loras(batch.req_ids))

    def _score_prompts(
        self, score: Callable[..., dict[str, Any]], compute: Any, states: Tensor, batch: Any, *step: Any
    ) -> dict[str, Any]:
        """Score all rows of a step with their adapters, in place of `compute_prompt_logprobs`."""
        numbers = self._adapters(batch).repeat(batch.num_scheduled_tokens)

        def compute_next(rows: Tensor) -> Any:
            nonlocal numbers
            self._use_adapters(batch, numbers[: len(rows)])
            numbers = numbers[len(rows) :]
            return compute(rows)

        return score(compute_next, states, batch, *step)

    def _propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Propose nothing: the scheduler brings proposals, and `begin` writes them."""
        drafts: Tensor = self._runner.req_states.draft_tokens[input_batch.idx_mapping]
        return drafts
