"""What the plug-in replaces in vLLM, and the check that vLLM has what it replaces and reads."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.worker_base import WorkerWrapperBase

logger = init_logger("vllm.plugins.gammaray_vllm")

_MARK = "_is_gammaray"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SAMPLE = "vllm.v1.sample"
_REJECTION = f"{_SAMPLE}.rejection_sampler:RejectionSampler.forward"

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


def install() -> None:
    """Hook into this process of vLLM; what draws is replaced once the model runner exists."""
    if not hasattr(WorkerWrapperBase.init_device, _MARK):
        WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device)
        SamplingParams._validate_spec_decode = _with_all_parameters(SamplingParams._validate_spec_decode)


def _with_hooks(init_device: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init_device)
    def hooked(self: Any) -> None:
        init_device(self)
        if reason := next(iter(differences()), "") or _other_runner(self.worker.model_runner):
            logger.error("gammaray-vllm is NOT active, and vLLM samples as without it: %s", reason)
            return
        from .sampler import CoupledSampler

        taken = ", ".join(CoupledSampler(self.worker.model_runner).install())
        promise = "a seed gives the same tokens with and without speculation"
        logger.warning("gammaray-vllm is ACTIVE: %s. Replaced: %s", promise, taken)

    setattr(hooked, _MARK, True)
    return hooked


def _with_all_parameters(validate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Let parameters pass with speculation that vLLM's own rejection sampler lacks."""

    @functools.wraps(validate)
    def checked(self: Any, speculative_config: Any) -> None:
        is_budgeted = getattr(self, "thinking_token_budget", None) is not None
        if speculative_config is None or not (self.min_p or self.logit_bias or is_budgeted) or differences():
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


def _other_runner(runner: Any) -> str:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    kind = f"{type(runner).__module__}.{type(runner).__name__}"
    is_known = isinstance(runner, GPUModelRunner)
    return "" if is_known else f"{kind} is not the V1 model runner, which VLLM_USE_V2_MODEL_RUNNER=0 selects"


@functools.cache
def differences() -> Sequence[str]:
    """Return where the installed vLLM differs from what the plug-in replaces and reads; () is nowhere."""
    found = []
    try:
        import_module(".sampler", __package__)
    except ImportError as error:
        return (str(error),)
    for name, text in (*PARAMETERS.items(), *NAMES.items()):
        wanted, is_whole = tuple(text.split()), PARAMETERS.get(name) == text
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
