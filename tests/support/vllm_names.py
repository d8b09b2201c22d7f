"""Names of vLLM that `services.vllm` uses: `python -m tests.support.vllm_names` prints those that are gone.

vLLM calls its custom schedulers and proposers unstable, so that one minor version is supported per release.
"""

from __future__ import annotations

import importlib
import inspect
import sys

from gammaray.deploy.engines import SUPPORTED_VLLM, vllm_build

NAMES: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs": ("create_engine_config",),
    "vllm.lora.request:LoRARequest": (),
    "vllm.model_executor.model_loader.reload.inplace:reload_weights": (),
    "vllm.platforms:current_platform": ("is_cpu",),
    "vllm.sampling_params:SamplingParams": (),
    "vllm.v1.core.block_pool:BlockPool": ("get_num_free_blocks",),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": (
        "evict_blocks",
        "get_block_ids",
        "get_computed_blocks",
        "reset_prefix_cache",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "_update_after_schedule",
        "finish_requests",
        "get_grammar_bitmask",
        "schedule",
        "update_draft_token_ids",
        "update_from_output",
    ),
    "vllm.v1.engine:EngineCoreRequest": (),
    "vllm.v1.engine.core:EngineCore": (
        "abort_requests",
        "add_request",
        "preprocess_add_request",
        "shutdown",
        "step",
    ),
    "vllm.v1.executor:Executor": (
        "collective_rpc",
        "get_class",
        "register_failure_callback",
        "take_draft_token_ids",
    ),
    "vllm.v1.outputs:DraftTokenIds": (),
    "vllm.v1.outputs:LogprobsTensors": (),
    "vllm.v1.outputs:SamplerOutput": (),
    "vllm.v1.request:RequestStatus": ("PREEMPTED",),
    "vllm.v1.sample.sampler:Sampler": ("gather_logprobs",),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer": ("_greedy_sample", "propose"),
    "vllm.v1.spec_decode.medusa:MedusaProposer": ("propose",),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("_sample", "get_draft_model", "sample_tokens"),
    "vllm.v1.worker.gpu_worker:Worker": ("execute_model", "load_model", "sample_tokens"),
}
"""Classes by module, with the attributes that are used of each."""

FIELDS: dict[str, tuple[str, ...]] = {
    "vllm.v1.request:Request": (
        "next_decode_eligible_step",
        "is_prefill_chunk",
        "all_token_ids",
        "spec_token_ids",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        "finished_req_ids",
        "max_num_running_reqs",
        "num_spec_tokens",
        "running",
    ),
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer": (
        "num_speculative_tokens",
        "parallel_drafting",
    ),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("execute_model_state", "sampler"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": (
        "_req_ids",
        "num_computed_tokens_cpu",
        "num_tokens_no_spec",
        "token_ids_cpu",
    ),
}
"""Attributes that instances get in `__init__`; looked for in its source."""


def find_missing() -> list[str]:
    """Return the names that the installed version lacks, such as `module:Class.attribute`."""
    missing = []
    for names, are_set_at_start in ((NAMES, False), (FIELDS, True)):
        for path, attributes in names.items():
            module, _, name = path.partition(":")
            try:
                found = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                missing.append(path)
                continue
            source = inspect.getsource(found.__init__) if are_set_at_start else ""
            for attribute in attributes:
                is_there = f"self.{attribute}" in source if are_set_at_start else hasattr(found, attribute)
                if not is_there:
                    missing.append(f"{path}.{attribute}")
    return missing


def main() -> int:
    """Print what the installed version lacks; return 1 if it lacks anything."""
    (version, _), missing = vllm_build(), find_missing()
    print(f"vllm {version or 'is not installed'}, supported: {SUPPORTED_VLLM}")
    for name in missing:
        print(f"missing: {name}")
    return 1 if missing or not version else 0


if __name__ == "__main__":
    sys.exit(main())
