"""vLLM's worker, whose model runner samples with gammaray's sampler."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from gammaray.program.parents import end_with_parent
from services.vllm.block_scheduler import NoProposer
from services.vllm.draft_sampler import DraftSampler
from services.vllm.heads import CoupledDrafts, replace_weights
from services.vllm.messages import Masks
from services.vllm.sampler import BlockSampler, gather_logprobs

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class SamplingWorker(PlatformWorker):  # type: ignore[misc]  # vLLM's classes are not typed here
    """Hands the blocks of a step to the sampler, and its verdicts back with the step's output.

    With tensor parallelism there is one in each of several processes. All get the same blocks and gather the
    same logits, so that they draw the same tokens; the verdicts of rank 0 are used.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            # vLLM asks its ranks to end through a pipe, which one that waits for another rank does not read.
            end_with_parent(signal.SIGKILL)
            if not parent.is_alive():
                os._exit(1)
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and replace the runner's sampling."""
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        self.sampler = self._make_sampler(runner, runner.model_config.get_vocab_size())
        runner._sample = lambda logits, metadata: self.sampler.sample(logits, metadata)
        runner.sampler.gather_logprobs = gather_logprobs
        if runner.lora_config:
            runner._get_prompt_logprobs_dict = partial(self._score_prompts, runner._get_prompt_logprobs_dict)

    def _make_sampler(self, runner: Any, vocab_size: int) -> BlockSampler | DraftSampler:
        sampler = BlockSampler(runner, vocab_size)
        if not isinstance(runner.drafter, NoProposer):
            CoupledDrafts(runner.drafter, sampler).install()
        return sampler

    def _score_prompts(self, score: Callable[..., dict[str, Any]], *step: Any) -> dict[str, Any]:
        """Score each prompt with its request's adapter: vLLM has one adapter per row that is sampled from."""
        runner, asked, scores = self.model_runner, self.model_runner.num_prompt_logprobs, dict[str, Any]()
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

    def execute_model(self, scheduler_output: Any) -> Any:
        self.sampler.begin(getattr(scheduler_output, "posted", {}), getattr(scheduler_output, "ended", ()))
        # A step that failed between the forward and the sampling has left it.
        self.model_runner.execute_model_state = None
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Masks | None) -> Any:
        """Sample after the forward; `grammar_output` are the masks of the scheduler."""
        self.sampler.take_masks(grammar_output)
        output = super().sample_tokens(None)
        output.verdicts, output.states = self.sampler.take_verdicts(), self.sampler.states
        return output

    def load_head(self, directory: str) -> None:
        """Let another version of a head that learns draft, between two steps."""
        replace_weights(self.model_runner.get_draft_model(), directory, self.vllm_config)


class DraftingWorker(SamplingWorker):
    """Draws a draft's proposals."""

    def _make_sampler(self, runner: Any, vocab_size: int) -> DraftSampler:
        return DraftSampler(runner, vocab_size)
