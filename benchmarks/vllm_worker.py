"""vLLM alone, served over stdin and stdout to `benchmarks.baselines`; one JSON per line.

vLLM's own scheduler, sampler and worker, unmodified and without speculation: gammaray's workers on vLLM have
to give the same greedy tokens. Needs an environment with vLLM (`make vllm`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

CACHE_BYTES = 256 << 20

_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the process ends with this one
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmWorker:
    """Holds a model in float32."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        self._model = LLM(
            model,
            dtype="float32",
            enforce_eager=True,  # as gammaray's workers on a CPU
            kv_cache_memory_bytes=CACHE_BYTES,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
            max_model_len=-1,  # the model's, or what one request can have of the cache
        )

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return one greedy completion and its time; `request` is made by `Baselines.generate`.

        Raises:
            ValueError: It is not greedy, or for another system than `generate`.
        """
        if request["system"] != "generate" or request["temperature"]:
            raise ValueError(f"got {request['system']} at {request['temperature']}, allowed: generate at 0")
        prompt = request["prompt"]
        token_ids = self._model.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        began = time.perf_counter()
        done = self._complete(
            token_ids,
            max_tokens=request["max_tokens"],
            ignore_eos=request["ignore_eos"],
            logprobs=2 if request["with_gaps"] else None,
        )
        seconds = time.perf_counter() - began
        (out,) = done.outputs
        gaps = self._gaps(token_ids, out) if request["with_gaps"] else None
        return {
            "token_ids": list(out.token_ids),
            "seconds": seconds,
            "arrivals": [(seconds, len(out.token_ids))],
            "gaps": gaps,
        }

    def _complete(self, token_ids: list[int], **options: Any) -> Any:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(token_ids)}]
        (done,) = self._model.generate(prompts, SamplingParams(temperature=0, **options), use_tqdm=False)
        return done

    def _gaps(self, prompt: list[int], out: Any) -> dict[str, Any]:
        """Return how far the second largest logit of each new token was below the largest.

        `noise` is the largest difference to the same gaps, computed by one forward over all tokens.
        """
        whole = self._complete([*prompt, *out.token_ids], max_tokens=1, prompt_logprobs=3)
        gaps, runners_up, noise = [], [], 0.0
        for at, (token, found) in enumerate(zip(out.token_ids, out.logprobs, strict=True), start=len(prompt)):
            (second,) = sorted(found.keys() - {token}, key=lambda other: -found[other].logprob)[:1]
            gaps.append(found[token].logprob - found[second].logprob)
            runners_up.append(second)
            again = whole.prompt_logprobs[at]
            if token in again and second in again:
                noise = max(noise, abs(again[token].logprob - again[second].logprob - gaps[-1]))
        return {"gaps": gaps, "runners_up": runners_up, "noise": noise}


def main() -> None:
    """Answer requests until stdin closes; the first line written says that the model is loaded."""
    os.environ |= _ENVIRONMENT
    target, _, threads = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    worker = VllmWorker(target)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.generate(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
