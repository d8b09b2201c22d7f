"""Completions of vLLM's V2 model runner without a GPU, with the plug-in; in a process of its own.

    python -m tests.support.second_runner TARGET_DIR {"METHOD": "DRAFTER_DIR", ...}

It prints a line of JSON for plain decoding and for each method: what `complete` of the tests of the plug-in
returns, what was accepted and drafted, and what the plug-in logs.
"""

import json
import os
import sys

import tests.support.triton_interpreter  # noqa: F401  # before vLLM

COUNT = 3
MAX_TOKENS = 24
BATCH = 12


def main():
    import gammaray_vllm

    gammaray_vllm.register()
    from gammaray_vllm import hooks
    from vllm.v1.sample.ops import topk_topp_sampler

    from services.vllm.heads import complete_config
    from tests.vllm import test_plugin as plugin

    topk_topp_sampler.HAS_TRITON = False  # its kernel does not run interpreted; vLLM has one of torch, too
    records = []
    for level in ("warning", "error"):
        setattr(hooks.logger, level, lambda text, *values: records.append(text % values))
    plugin.CASES = [*((kind, 0.7) for kind in plugin.KINDS), ("plain", 0), ("plain", 1)]
    plugin.MAX_TOKENS = MAX_TOKENS
    target, drafters = sys.argv[1], json.loads(sys.argv[2])
    for method in (None, *drafters):
        drafting = method and plugin.speculation(method, COUNT, drafters)
        options = {"hf_overrides": complete_config} if method == "eagle3" else {}
        with plugin.served(target, drafting, max_num_seqs=BATCH, **options) as llm:
            engine = llm.llm_engine.engine_core.engine_core
            runner = type(engine.model_executor.driver_worker.worker.model_runner).__module__
            tokens, ranks, logprobs = plugin.complete(llm)
            counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        numbers = [counted.get(f"vllm:spec_decode_num_{name}_tokens") for name in ("accepted", "draft")]
        found = {"method": method, "tokens": tokens, "ranks": ranks, "logprobs": logprobs}
        found |= {"counted": numbers, "runner": runner, "log": records[-1]}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    main()
