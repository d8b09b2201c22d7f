"""What the plug-in replaces in vLLM, and the check that vLLM has what it replaces and reads."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.worker_base import WorkerWrapperBase

from . import RUNNER_VARIABLE

logger = init_logger("vllm.plugins.gammaray_vllm")

_MARK = "_is_gammaray"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SAMPLE = "vllm.v1.sample"
_REJECTION = f"{_SAMPLE}.rejection_sampler:RejectionSampler.forward"

_GPU = "vllm.v1.worker.gpu"

PARAMETERS: dict[str, str] = {
    f"{_RUNNER}._sample": "self logits spec_decode_metadata",
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._greedy_sample": "self hidden_states",
    "vllm.sampling_params:SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": "self",
    _REJECTION: "self metadata draft_probs logits sampling_metadata",
    f"{_SAMPLE}.ops.topk_topp_sampler:TopKTopPSampler.forward_native": "self logits generators k p",
    f"{_SAMPLE}.ops.topk_topp_sampler:apply_top_k_top_p": "logits k p",
    f"{_SAMPLE}.logits_processor.interface:BatchUpdate": "batch_size removed added moved",
    f"{_SAMPLE}.logits_processor:LogitsProcessors": "logitsprocs",
    # A new field may be a rule of sampling that the plug-in does not know.
    f"{_SAMPLE}.metadata:SamplingMetadata": (
        "temperature all_greedy all_random top_p top_k generators max_num_logprobs no_penalties "
        "prompt_token_ids frequency_penalties presence_penalties repetition_penalties output_token_ids "
        "allowed_token_ids_mask bad_words_token_ids logitsprocs logprob_token_ids spec_token_ids "
        "thinking_budget_state_holder"
    ),
}
"""Module and name of what is replaced, called or copied -> all of its parameters."""

NAMES: dict[str, str] = {
    f"{_RUNNER}.__init__": "sampler rejection_sampler input_batch requests speculative_config",
    f"{_RUNNER}._prepare_inputs": "seq_lens num_computed_tokens",
    f"{_RUNNER}._sample": "sampler rejection_sampler input_batch sampling_metadata",
    f"{_SAMPLE}.sampler:Sampler.sample": "topk_topp_sampler generators top_k top_p",
    _REJECTION: "target_logits_indices draft_token_ids",
    "vllm.v1.worker.gpu_input_batch:InputBatch.__init__": "req_id_to_index generators",
}
"""Function -> names in its code, of attributes that the plug-in reads."""

SECOND_PARAMETERS: dict[str, str] = {
    "vllm.sampling_params:SamplingParams._validate_spec_decode": "self speculative_config",
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": "self",
    f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler._verify": (
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
        "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
    ),
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.sample_draft": (
        "self hidden_states sample_src_positions idx_mapping temperature seeds draft_step draft_logits "
        "spec_step_idx"
    ),
    f"{_GPU}.sample.sampler:Sampler.apply_sampling_params": (
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids expanded_local_pos "
        "seq_lens_upper_bound_np skip_top_k_top_p"
    ),
    f"{_GPU}.sample.gumbel:gumbel_sample": (
        "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting logits_cache "
        "logits_cache_col use_fp64 logits_cache_source"
    ),
}
"""The same for the V2 model runner."""

SECOND_NAMES: dict[str, str] = {
    f"{_GPU}.model_runner:GPUModelRunner.__init__": "vllm_config",
    f"{_GPU}.spec_decode.rejection_sampler:RejectionSampler.__init__": "sampler num_speculative_steps",
    f"{_GPU}.spec_decode.speculator:DraftModelSpeculator.sample_draft": (
        "use_local_argmax_reduction get_draft_top_tokens compute_draft_logits use_fp64_gumbel "
        "_maybe_predict_acceptance"
    ),
    f"{_GPU}.sample.sampler:Sampler.__init__": "sampling_states use_fp64_gumbel",
    f"{_GPU}.sample.sampler:Sampler._sample_random": "gumbel_sample temperature seeds",
}
"""The same for the V2 model runner."""


def install() -> None:
    """Hook into this process of vLLM; what draws is replaced once the model runner exists."""
    if not hasattr(WorkerWrapperBase.init_device, _MARK):
        WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device)
        SamplingParams._validate_spec_decode = _with_all_parameters(SamplingParams._validate_spec_decode)


def _with_hooks(init_device: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init_device)
    def hooked(self: Any) -> None:
        init_device(self)
        runner, is_second = self.worker.model_runner, selects_second()
        if reason := next(iter(differences(is_second)), "") or _other_runner(runner, is_second):
            logger.error("gammaray-vllm is NOT active, and vLLM samples as without it: %s", reason)
            return
        if is_second:
            from .second_runner import install as install_second

            taken = install_second(runner)
        else:
            from .sampler import CoupledSampler

            taken = CoupledSampler(runner).install()
        promise = "a seed gives the same tokens with and without speculation"
        logger.warning("gammaray-vllm is ACTIVE: %s. Replaced: %s", promise, ", ".join(taken))

    setattr(hooked, _MARK, True)
    return hooked


def _with_all_parameters(validate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Let parameters pass with speculation that vLLM's own rejection sampler lacks."""

    @functools.wraps(validate)
    def checked(self: Any, speculative_config: Any) -> None:
        is_budgeted = getattr(self, "thinking_token_budget", None) is not None
        is_given = self.min_p or self.logit_bias or is_budgeted
        if speculative_config is None or not is_given or differences(selects_second()):
            return validate(self, speculative_config)
        if is_budgeted:
            raise VLLMValidationError(
                "thinking_token_budget is not supported with speculative decoding by gammaray-vllm.",
                parameter="thinking_token_budget",
            )
        others = copy.copy(self)
        others.min_p, others.logit_bias = 0.0, None
        return validate(others, speculative_config)

    return checked


def selects_second() -> bool:
    """Whether the V2 model runner is asked for."""
    return os.environ.get(RUNNER_VARIABLE, "0") not in ("", "0")


def _other_runner(runner: Any, is_second: bool) -> str:
    known = import_module(f"{_GPU}.model_runner" if is_second else f"{_GPU}_model_runner").GPUModelRunner
    if not isinstance(runner, known):
        kind, number = f"{type(runner).__module__}.{type(runner).__name__}", 1 + is_second
        return f"{kind} is not the V{number} model runner, which {RUNNER_VARIABLE}={number - 1} selects"
    is_marked = is_second and getattr(runner.vllm_config, "watermark_config", None) is not None
    return "it draws no watermarked tokens" if is_marked else ""


@functools.cache
def differences(is_second: bool) -> Sequence[str]:
    """Return where the installed vLLM differs from what the plug-in replaces and reads; () is nowhere."""
    found = []
    try:
        import_module(".second_runner" if is_second else ".sampler", __package__)
    except ImportError as error:
        return (str(error),)
    parameters, names_read = (SECOND_PARAMETERS, SECOND_NAMES) if is_second else (PARAMETERS, NAMES)
    for name, text in (*parameters.items(), *names_read.items()):
        wanted, is_whole = tuple(text.split()), parameters.get(name) == text
        module, _, path = name.partition(":")
        try:
            value: Any = functools.reduce(getattr, path.split("."), import_module(module))
            code: Any = inspect.unwrap(value)
            names = tuple(inspect.signature(value).parameters) if is_whole else code.__code__.co_names
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            found.append(f"{name} is missing ({error})")
            continue
        if missing := [each for each in wanted if each not in names]:
            found.append(f"{name} has no {missing[0]}")
        elif is_whole and names != wanted:
            found.append(f"{name} has {' '.join(names)}")
    return tuple(found)
