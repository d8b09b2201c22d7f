"""What the plug-in replaces in vLLM, and the check that vLLM has what it replaces and reads."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.worker_base import WorkerWrapperBase

logger = init_logger("vllm.plugins.gammaray_vllm")

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_DRAFTER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_PROCESSORS = "vllm.v1.sample.logits_processor"

CALLED: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}._sample": ("self", "logits", "spec_decode_metadata"),
    f"{_DRAFTER}._greedy_sample": ("self", "hidden_states"),
    "vllm.sampling_params:SamplingParams._validate_spec_decode": ("self", "speculative_config"),
    "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device": ("self",),
    "vllm.v1.sample.sampler:Sampler.forward": (
        *("self", "logits", "sampling_metadata", "predict_bonus_token", "logprobs_mode_override"),
    ),
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": (
        *("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native": (
        *("self", "logits", "generators", "k", "p"),
    ),
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": ("logits", "k", "p"),
    f"{_PROCESSORS}.interface:BatchUpdate": ("batch_size", "removed", "added", "moved"),
    f"{_PROCESSORS}:BUILTIN_LOGITS_PROCESSORS": (),
    f"{_PROCESSORS}:LogitsProcessors": (),
}
"""Module and name of what is replaced or called -> the parameters that it has to have, if they matter."""

READ: dict[str, tuple[str, ...]] = {
    f"{_RUNNER}.__init__": ("sampler", "rejection_sampler", "input_batch", "requests", "speculative_config"),
    f"{_RUNNER}._prepare_inputs": ("seq_lens",),
    f"{_RUNNER}._sample": ("sampler", "rejection_sampler", "input_batch", "sampling_metadata"),
    "vllm.v1.sample.sampler:Sampler.sample": ("topk_topp_sampler", "generators", "top_k", "top_p"),
    "vllm.v1.worker.gpu_input_batch:InputBatch.__init__": ("req_id_to_index", "generators"),
}
"""Function -> names that its code uses, which are attributes that the plug-in reads."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.sample.metadata:SamplingMetadata": (
        *("temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs"),
        *("no_penalties", "prompt_token_ids", "frequency_penalties", "presence_penalties"),
        *("repetition_penalties", "output_token_ids", "allowed_token_ids_mask", "bad_words_token_ids"),
        *("logitsprocs", "logprob_token_ids", "spec_token_ids", "thinking_budget_state_holder"),
    ),
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": (
        *("draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "cu_num_sampled_tokens"),
        *("target_logits_indices", "bonus_logits_indices", "logits_indices"),
    ),
}
"""Dataclass -> all of its fields: a new one may be a rule of sampling that the plug-in does not know."""


def install() -> None:
    """Hook into this process of vLLM; what is drawn is replaced once its model runner exists."""
    if getattr(WorkerWrapperBase.init_device, "__wrapped__", None) is None:
        WorkerWrapperBase.init_device = _with_hooks(WorkerWrapperBase.init_device)
        SamplingParams._validate_spec_decode = _with_all_parameters(SamplingParams._validate_spec_decode)


def _with_hooks(init_device: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(init_device)
    def hooked(self: Any) -> None:
        init_device(self)
        if found := differences() or _other_runner(self.worker.model_runner):
            logger.error("gammaray-vllm is NOT active, vLLM samples as without it: %s", "; ".join(found))
            return
        from .sampler import CoupledSampler

        taken = CoupledSampler(self.worker.model_runner).install()
        logger.warning(
            "gammaray-vllm is ACTIVE: a seed gives the same tokens with and without speculation. "
            "It replaced %s",
            ", ".join(taken),
        )

    return hooked


def _with_all_parameters(validate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Allow with speculation what vLLM's own rejection sampler leaves out."""

    @functools.wraps(validate)
    def checked(self: Any, speculative_config: Any) -> None:
        if speculative_config is None:
            return
        given = self
        is_budgeted = self.thinking_token_budget is not None
        if (self.min_p or self.logit_bias or is_budgeted) and not differences():
            if is_budgeted:
                raise ValueError("thinking_token_budget is not supported by gammaray-vllm with speculation")
            given = copy.copy(self)
            given.min_p, given.logit_bias = 0.0, None
        validate(given, speculative_config)

    return checked


def _other_runner(runner: Any) -> Sequence[str]:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if isinstance(runner, GPUModelRunner):
        return ()
    kind = f"{type(runner).__module__}.{type(runner).__name__}"
    return (f"{kind} is not the V1 model runner, which VLLM_USE_V2_MODEL_RUNNER=0 selects",)


@functools.cache
def differences() -> Sequence[str]:
    """Return where the installed vLLM differs from what the plug-in replaces and reads, empty if nowhere."""
    checks = ((CALLED, _parameters), (READ, _names_used), (FIELDS, _fields))
    found = []
    for wanted, facts in checks:
        for name, expected in wanted.items():
            try:
                actual = facts(_resolve(name))
            except (ImportError, AttributeError, TypeError, ValueError) as error:
                found.append(f"{name} is missing ({error})")
                continue
            if expected and (missing := set(expected) - set(actual)):
                found.append(f"{name} has no {', '.join(sorted(missing))}")
            elif facts is not _names_used and expected and tuple(actual) != expected:
                found.append(f"{name} has also {', '.join(sorted(set(actual) - set(expected)))}")
    return tuple(found)


def _resolve(name: str) -> Any:
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), import_module(module))


def _parameters(found: Any) -> Sequence[str]:
    return tuple(inspect.signature(found).parameters) if callable(found) else ()


def _names_used(found: Any) -> Sequence[str]:
    return tuple(inspect.unwrap(found).__code__.co_names)


def _fields(found: Any) -> Sequence[str]:
    return tuple(field.name for field in dataclasses.fields(found))
