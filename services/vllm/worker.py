"""vLLM's worker, whose model runner samples with gammaray's sampler."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from gammaray.program.parents import end_with_parent
from services.vllm.draft_sampler import DraftSampler
from services.vllm.heads import replace_weights
from services.vllm.messages import Masks
from services.vllm.runners import FirstRunner, SecondRunner
from services.vllm.sampler import BlockSampler, StepSampler

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class SamplingWorker(PlatformWorker):  # type: ignore[misc]  # vLLM's classes are not typed here
    """Hands the blocks of a step to the sampler, and its verdicts back with the step's output.

    With tensor parallelism there is one in each of several processes. All get the same blocks and gather the
    same logits, so that they draw the same tokens; the verdicts of rank 0 are used.
    """

    sampler_class: ClassVar[type[StepSampler]] = BlockSampler

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
        self.runner = SecondRunner(runner) if self.use_v2_model_runner else FirstRunner(runner)
        vocab_size = runner.model_config.get_vocab_size()
        self.sampler = self.sampler_class(vocab_size, runner.device, self.runner.tokens)
        self.runner.install(self.sampler)

    def execute_model(self, scheduler_output: Any) -> Any:
        self.sampler.begin(scheduler_output)
        self.runner.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Masks | None) -> Any:
        """Sample after the forward; `grammar_output` are the masks of the scheduler."""
        self.sampler.take_masks(grammar_output)
        output = super().sample_tokens(None)
        if isinstance(output, AsyncModelRunnerOutput):  # of V2
            output = output.get_output()
        output.verdicts, output.states = self.sampler.take_verdicts(), self.sampler.states
        return output

    def load_head(self, directory: str) -> None:
        """Let another version of a head that learns draft, between two steps."""
        replace_weights(self.model_runner.get_draft_model(), directory, self.vllm_config)


class DraftingWorker(SamplingWorker):
    """Draws a draft's proposals."""

    sampler_class = DraftSampler
