"""What the plug-in replaces, calls and reads in vLLM, and the comparison of a vLLM with it.

Nothing of vLLM is imported, so that `benchmarks.vllm_hooks` can compare the source of any version. A key of
the tables is a module and a name in it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_SAMPLE = "vllm.v1.sample"
_PROPOSER = "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer"
_REJECTION = f"{_SAMPLE}.rejection_sampler:RejectionSampler.forward"
_VALIDATE = "vllm.sampling_params:SamplingParams._validate_spec_decode"
_INIT = "vllm.v1.worker.worker_base:WorkerWrapperBase.init_device"
_GPU = "vllm.v1.worker.gpu"
_SPECULATOR = f"{_GPU}.spec_decode.speculator"
_VERIFIER = f"{_GPU}.spec_decode.rejection_sampler"

PARAMETERS: dict[str, str] = {
    f"{_RUNNER}._sample": "self logits spec_decode_metadata",
    f"{_PROPOSER}._greedy_sample": "self hidden_states",
    _VALIDATE: "self speculative_config",
    _INIT: "self",
    _REJECTION: "self metadata draft_probs logits sampling_metadata",
    f"{_SAMPLE}.ops.topk_topp_sampler:TopKTopPSampler.forward_native": "self logits generators k p",
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
"""What is replaced, called or copied -> all of its parameters."""

CALLED: dict[str, Sequence[str]] = {f"{_SAMPLE}.ops.topk_topp_sampler:apply_top_k_top_p": ("logits k p",)}
"""Function that may have more parameters if those have defaults -> what the others can be."""

NAMES: dict[str, str] = {
    f"{_RUNNER}.__init__": "sampler rejection_sampler input_batch requests speculative_config",
    f"{_RUNNER}._prepare_inputs": "seq_lens num_computed_tokens",
    f"{_RUNNER}._sample": "sampler rejection_sampler input_batch sampling_metadata",
    f"{_SAMPLE}.sampler:Sampler.sample": "topk_topp_sampler generators top_k top_p",
    _REJECTION: "target_logits_indices draft_token_ids",
    f"{_PROPOSER}.__init__": "use_local_argmax_reduction",
    f"{_SAMPLE}.ops.topk_topp_sampler:TopKTopPSampler.__init__": "logprobs_mode",
    "vllm.v1.worker.gpu_input_batch:InputBatch.__init__": "req_id_to_index generators",
}
"""Function, or class for all functions in it -> names in its code, of what the plug-in reads or replaces."""

SECOND_PARAMETERS: dict[str, str] = {_VALIDATE: "self speculative_config", _INIT: "self"}
"""The same for the V2 model runner, as what follows."""

SECOND_CALLED: dict[str, Sequence[str]] = {
    f"{_VERIFIER}:rejection_sample": (
        "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping expanded_idx_mapping "
        "expanded_local_pos temperature seed num_speculative_steps",
    ),
    f"{_SPECULATOR}:DraftModelSpeculator.sample_draft": [
        f"self hidden_states {name} idx_mapping temperature seeds draft_step draft_logits"
        for name in ("positions", "sample_src_positions")
    ],
    f"{_SPECULATOR}:gumbel_sample": [
        f"logits expanded_idx_mapping temperature seed pos apply_temperature{last}"
        for last in ("", " is_drafting")
    ],
}

SECOND_NAMES: dict[str, str] = {
    f"{_GPU}.model_runner:GPUModelRunner.__init__": "vllm_config",
    f"{_VERIFIER}:RejectionSampler": "apply_sampling_params rejection_sample use_fp64_gumbel",
    f"{_SPECULATOR}:DraftModelSpeculator.sample_draft": "gumbel_sample use_fp64_gumbel",
    f"{_GPU}.sample.sampler:Sampler": "apply_sampling_params gumbel_sample temperature seeds use_fp64_gumbel",
}


class Found(NamedTuple):
    """What a vLLM has under a name: parameters, those without defaults, and names in the code."""

    parameters: Sequence[str]
    required: Sequence[str]
    names: Container[str]


def differences(is_second: bool, look: Callable[[str], Found]) -> Iterator[str]:
    """Yield where a vLLM differs from what the plug-in needs for a model runner.

    Args:
        is_second: For the V2 model runner.
        look: Takes a key of the tables; raises an exception if vLLM has nothing there.
    """
    first, second = (PARAMETERS, CALLED, NAMES), (SECOND_PARAMETERS, SECOND_CALLED, SECOND_NAMES)
    whole, called, read = second if is_second else first
    for name in dict.fromkeys((*whole, *called, *read)):
        try:
            parameters, required, names = look(name)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            yield f"{name} is missing ({error})"
            continue
        missing = [each for each in read.get(name, "").split() if each not in names]
        if name in whole and " ".join(parameters) != whole[name]:
            yield f"{name} has {' '.join(parameters)}"
        elif name in called and " ".join(required) not in called[name]:
            yield f"{name} requires {' '.join(required)}"
        elif missing:
            yield f"{name} has no {missing[0]}"
