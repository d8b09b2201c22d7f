"""vLLM's `EngineCore` with one request per session, which runs only while a block is posted for it.

Epochs and deadlines are known to `services.vllm.scheduler`. Not thread-safe, except for `check` and `stats`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from gammaray.engines import SUPPORTED_VLLM, check_installed, vllm_build
from gammaray.errors import InvalidArgumentError
from services.engine.cache_budget import cache_budget
from services.engine.core.errors import EngineLostError
from services.engine.core.kv_cache import CacheStats
from services.process.adapters import adapter_error, max_rank
from services.scheduling.tasks import SessionSpec
from services.vllm.messages import (
    IS_KEPT,
    SESSION,
    SPEC,
    BeginMasks,
    DraftBlock,
    PostedBlock,
    States,
    Verdicts,
)

_log = logging.getLogger(__name__)

MAX_REQUESTS = 256
"""Most sessions with a KV cache at once; vLLM's scheduler has a slot for each."""

MAX_MESSAGE = 200
"""Characters of vLLM's own message in an error."""

_PREFIX = re.compile(r"\A\d{1,3} validation errors? for \w+ (?:Value error, )?")
"""What pydantic puts before a message."""

_OF_MEMORY = ("auto-fit", "cache blocks", "free memory", "kv cache")
"""Words of its messages about too little memory."""

CPU_DRAFT_BLOCK = 32
"""Tokens of a KV block of a draft model on a CPU: the prefix cache has whole blocks, so that each proposal
feeds half a block again. vLLM's own choice there is 128, on GPUs 16."""

_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the worker's settings say which cores it has
    "VLLM_CONFIGURE_LOGGING": "0",  # the worker's logging is configured already
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else vLLM's CPU build starts a process for one rank, too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # "1" is V2, which no GPU has run with `services.vllm.runners`
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the worker has threads, of gRPC among others
}
"""Defaults of vLLM's own variables; what the user sets is kept."""

_NO_PROPOSER = {"method": "custom_class", "model": "services.vllm.block_scheduler.NoProposer"}
"""vLLM reserves slots for draft tokens only where a drafter is configured."""

_SECOND_NO_PROPOSER = {"method": "ngram", "prompt_lookup_max": 1}
"""The same for the V2 runner, which takes no class; `services.vllm.runners` lets it draft nothing."""


@dataclass(frozen=True)
class EngineOptions:
    model: str  # directory or hub name
    device: str = "auto"  # or "cpu", "cuda"
    dtype: str = "auto"  # or "float32", "bfloat16", "float16"
    threads: int = 1  # of the arithmetic on CPUs, of each rank; on GPUs vLLM's own choice is kept
    max_batch_tokens: int = 1024  # tokens fed in one forward, over all sessions
    prefill_chunk: int = 256  # tokens of one session's prompt in one forward while others wait
    max_proposal: int = 16  # most tokens of one proposal
    cache_budget_bytes: int | None = None  # memory for keys and values; None: from the device's memory
    memory_share: float = 0.8  # of a GPU, for weights, activations and cache, if there is no budget
    tensor_parallel: int = 1  # GPUs (or CPU ranks) that the model is spread over
    head: str = ""  # drafts in the target, see `services.vllm.heads.drafter_config`; empty: nothing does
    adapters: Mapping[str, str] = field(default_factory=dict)  # directories or hub names, by sessions' name
    is_batch_invariant: bool = False  # whether a row has the same bits in every batch; on GPUs
    is_draft: bool = False  # whether it drafts: requests run freely, most of their prompts is cached


@dataclass(frozen=True, slots=True)
class StepResult:
    verdicts: Verdicts  # outcome of each posted block that the step completed
    num_tokens: int  # tokens that it fed
    scheduled: Collection[str]  # the requests that ran
    num_cached: dict[str, int]  # tokens found in the prefix cache, of requests whose prompt it completed
    prompt_scores: dict[str, Any]  # of those that asked for them: vLLM's `LogprobsTensors` of the prompt
    drafts: dict[str, list[int]]  # what vLLM's own drafter proposes after the step, by request
    states: States  # hidden states of the committed tokens that it computed, of requests that are learnt from
    preempted: list[str]  # requests that lost their cache; they have to be closed


class VllmEngine:
    """One model on vLLM.

    Attributes:
        vocab_size: Token ids lie in [0, vocab_size).
        max_context: Positions lie in [0, max_context).
        kernel: For operators: vLLM, its version and device.
        is_lost: Whether a process of vLLM has ended; `check` raises then.

    Raises:
        UnsupportedVllmError: vLLM is missing, or in another version.
        InvalidArgumentError: vLLM cannot load the model or an adapter, there is no GPU, or too little memory
            for the cache.
    """

    def __init__(self, options: EngineOptions) -> None:
        check_installed("vllm", options.device)
        _prepare_process(options)
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        self.is_lost = False
        try:
            config = _configuration(options)
            _check_layers(config.model_config)
            executor = Executor.get_class(config)
            self.core = EngineCore(config, executor, log_stats=False, executor_fail_callback=self.note_loss)
        except (EngineLostError, InvalidArgumentError):
            raise
        except Exception as error:  # vLLM raises many kinds
            raise _start_error(options, error) from error
        model = config.model_config
        self.vocab_size = int(model.get_vocab_size())
        self.max_context = int(model.max_model_len) - 1  # vLLM keeps a position for the token that it samples
        self.device = _device()
        self.dtype = str(model.dtype).removeprefix("torch.")
        ranks = f" on {options.tensor_parallel} ranks" if options.tensor_parallel > 1 else ""
        self.kernel = f"vLLM {vllm_build()[0]} ({self.device}, {self.dtype}){ranks}"
        self.kernel += ", batch-invariant" if options.is_batch_invariant else ""
        self.max_proposal = options.max_proposal
        if config.use_v2_model_runner:
            self.max_proposal = int(config.num_speculative_tokens)  # it has room for a head's drafts only
            self.kernel += ", V2 model runner"
            if self.device != "cpu":
                _log.warning("vLLM's V2 model runner was never run with gammaray on a GPU")
        self._scheduler = self.core.scheduler  # of the class `services.vllm.block_scheduler.BlockScheduler`
        self._has_drafter = bool(options.head)
        self.pool = self._scheduler.kv_cache_manager.block_pool
        self._block_size = int(config.cache_config.block_size)
        num_bytes = sum(int(tensor.size) for tensor in self._scheduler.kv_cache_config.kv_cache_tensors)
        self._block_bytes = num_bytes // max(1, self.pool.num_gpu_blocks)
        self._num_opened = 0
        self._adapters = self._load_adapters(options.adapters)
        self.num_evictions = 0

    def _load_adapters(self, directories: Mapping[str, str]) -> dict[str, Any]:
        """Load all adapters, so that a wrong one is found at the start; return vLLM's requests for them."""
        from vllm.lora.request import LoRARequest

        requests = {}
        for number, (name, directory) in enumerate(directories.items(), start=1):
            requests[name] = LoRARequest(name, number, directory)
            try:
                self.core.add_lora(requests[name])
            except Exception as error:  # vLLM raises many kinds
                self.shutdown()
                raise adapter_error(name, directory, str(error)) from error
        return requests

    @property
    def num_free_requests(self) -> int:
        """Requests that may be opened in addition to those that exist."""
        return int(self._scheduler.max_num_running_reqs) - len(self._scheduler.requests)

    def needed_blocks(self, num_tokens: int) -> int:
        """Return the KV blocks of that many tokens, and of the draft tokens after them."""
        return int(-(-(num_tokens + self._scheduler.num_lookahead_tokens) // self._block_size))

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that no request holds; those of the prefix cache among them."""
        return int(self.pool.get_num_free_blocks())

    def num_blocks(self, request_id: str) -> int:
        """Return the KV blocks that a request holds."""
        return sum(map(len, self._scheduler.kv_cache_manager.get_block_ids(request_id)))

    def open(
        self,
        name: str,
        token_ids: Sequence[int],
        spec: SessionSpec,
        salt: str,
        num_prompt_logprobs: int | None = None,
        is_kept: bool = False,
    ) -> str:
        """Add a request with a prompt, and return its id.

        It runs until its prompt, of at least one token, is computed, and then only when posted.

        Args:
            salt: Requests with the same salt share the prefix cache.
            num_prompt_logprobs: Alternatives per token of the prompt; None: it is not scored.
            is_kept: Whether it is learnt from.
        """
        self._num_opened += 1
        request_id = f"{name}#{self._num_opened}"
        request = self._request(request_id, name, token_ids, spec, salt, num_prompt_logprobs, is_kept)
        self.core.add_request(*request)
        return request_id

    def _request(
        self,
        request_id: str,
        name: str,
        token_ids: Sequence[int],
        spec: SessionSpec,
        salt: str,
        num_prompt_logprobs: int | None = None,
        is_kept: bool = False,
    ) -> Any:
        """Return a request of vLLM, with what it calls the wave."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        params = SamplingParams(
            temperature=0,  # vLLM's own sampling is replaced
            max_tokens=self.max_context + 1,
            ignore_eos=True,
            prompt_logprobs=num_prompt_logprobs,
            extra_args={SESSION: name, SPEC: spec, IS_KEPT: is_kept},
        )
        return self.core.preprocess_add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(token_ids),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=self._adapters[spec.adapter] if spec.adapter else None,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )

    def tokens(self, request_id: str) -> Sequence[int] | None:
        """Return the tokens of a request, prompt and output; None if vLLM has none with this id."""
        request = self._scheduler.requests.get(request_id)
        return None if request is None else request.all_token_ids

    def post(self, request_id: str, block: PostedBlock | DraftBlock) -> None:
        """Let a request run: once with a target's block, or a token per step with a draft's."""
        self._scheduler.post(request_id, block)

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Stop the request of a draft for some steps, or let it go on; it keeps its cache."""
        self._scheduler.pause(request_id, is_paused=is_paused)

    def end_session(self, session_id: str) -> None:
        """Tell the sampler with the next step that a session has ended."""
        self._scheduler.ended.append(session_id)

    def close(self, request_id: str) -> None:
        """End a request; its blocks stay in the prefix cache until others need them."""
        self._scheduler.withdraw(request_id)
        if request_id in self._scheduler.requests:
            self.core.abort_requests([request_id])

    def forget(self, token_ids: Sequence[int], spec: SessionSpec, salt: str) -> None:
        """Drop what the prefix cache has of these tokens, for requests with this salt and adapter."""
        manager = self._scheduler.kv_cache_manager
        # A look-up leaves the last token out.
        request, _ = self._request("", "", [*token_ids, 0], spec, salt)
        dropped = set[int]()
        # Requests that computed the same tokens at the same time have equal blocks; a look-up finds one.
        while blocks := set(chain(*manager.get_computed_blocks(request)[0].get_block_ids())) - dropped:
            manager.evict_blocks(blocks)
            dropped |= blocks

    def load_head(self, directory: str) -> None:
        """Let another version of the head draft from here on; requests keep what was cached.

        Where vLLM fails, its head may have no weights: EngineLostError.
        """
        try:
            self.core.model_executor.collective_rpc("load_head", args=(directory,))
        except Exception as error:  # vLLM raises many kinds
            raise EngineLostError(f"vLLM cannot load the head {directory}: {error}") from error

    def recover(self) -> None:
        """Drop the prefix cache after a step that failed; no request may be open."""
        if not self._scheduler.recover():
            raise EngineLostError("vLLM does not release its KV cache after a step that failed")

    def step(self, begin_masks: BeginMasks) -> StepResult:
        """Run a step for posted requests and prompts; `begin_masks` is called before their forward."""
        self.check()
        self._scheduler.begin_masks = begin_masks
        self._scheduler.num_scheduled, self._scheduler.states = {}, {}
        try:
            outputs, _ = self.core.step()
        except Exception:
            self.check()  # an executor that failed is the cause
            raise
        num_cached, scores = dict[str, int](), dict[str, Any]()
        for output in chain.from_iterable(each.outputs for each in outputs.values()):
            if output.prefill_stats is not None:
                num_cached[output.request_id] = int(output.prefill_stats.num_cached_tokens)
            if output.new_prompt_logprobs_tensors is not None:
                scores[output.request_id] = output.new_prompt_logprobs_tensors
        scheduled = self._scheduler.num_scheduled
        return StepResult(
            self._scheduler.take_verdicts(),
            sum(scheduled.values()),
            scheduled.keys(),
            num_cached,
            scores,
            self._drafts(),
            self._scheduler.states,
            self._scheduler.preempted(),
        )

    def _drafts(self) -> dict[str, list[int]]:
        if not self._has_drafter:
            return {}
        drafts = self.core.model_executor.take_draft_token_ids()
        return {} if drafts is None else dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True))

    def check(self) -> None:
        """Raise EngineLostError when a process of vLLM has ended; any thread may call it."""
        # vLLM calls back only when the ranks that are left have ended, too.
        if self.is_lost or getattr(self.core.model_executor, "is_failed", False):
            raise EngineLostError("a process of vLLM has ended")

    def stats(self) -> CacheStats:
        """Return the counters of the KV cache; any thread may call it."""
        used = self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()  # vLLM keeps one block empty
        return CacheStats(
            num_sessions=len(self._scheduler.requests),
            cache_bytes=used * self._block_bytes,
            cache_budget_bytes=self.pool.num_gpu_blocks * self._block_bytes,
            num_evictions=self.num_evictions,
            retained_bytes=0,
        )

    def shutdown(self) -> None:
        self.core.shutdown()

    def note_loss(self) -> None:
        self.is_lost = True


def _prepare_process(options: EngineOptions) -> None:
    """Set what vLLM reads from the process when it is imported: variables, threads, levels of its logs."""
    import torch

    is_cpu = vllm_build()[1] == "cpu"
    if options.is_batch_invariant:
        if is_cpu:
            raise InvalidArgumentError("deterministic", True, "false with vLLM on a CPU, or another engine")
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if options.tensor_parallel > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if is_cpu:  # vLLM leaves the threads of this process and of its ranks as they are
        torch.set_num_threads(options.threads)
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # What it logs of a configuration that it cannot read is raised, too, and so is the error of a step.
    for name in ("transformers_utils", "logging_utils.dump_input"):
        logging.getLogger(f"vllm.{name}").setLevel(logging.CRITICAL)


def _configuration(options: EngineOptions) -> Any:
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs

    from services.vllm.heads import complete_config, drafter_config  # they need torch

    device = _device()
    dtype = options.dtype if options.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": dtype,
        "max_model_len": -1,  # the model's, or what one session can have of the cache
        "max_num_seqs": min(MAX_REQUESTS, options.max_batch_tokens),  # vLLM allows no more
        "max_num_batched_tokens": options.max_batch_tokens,
        "long_prefill_token_threshold": options.prefill_chunk,
        "tensor_parallel_size": options.tensor_parallel,
        "distributed_executor_backend": "mp" if options.tensor_parallel > 1 else "uni",
        "max_logprobs": -1,  # checked by the worker
        "enforce_eager": device == "cpu",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "async_scheduling": False,  # the sampler's outcomes are needed before the next step
        "scheduler_cls": "services.vllm.block_scheduler.BlockScheduler",
    }
    if options.is_draft:
        arguments["worker_cls"] = "services.vllm.worker.DraftingWorker"
        if device == "cpu":
            arguments["block_size"] = CPU_DRAFT_BLOCK
    else:
        arguments["worker_cls"] = "services.vllm.worker.SamplingWorker"
        proposer = _SECOND_NO_PROPOSER if envs.VLLM_USE_V2_MODEL_RUNNER else _NO_PROPOSER
        arguments["speculative_config"] = {**proposer, "num_speculative_tokens": options.max_proposal}
    if options.head:
        arguments |= {"speculative_config": drafter_config(options.head), "hf_overrides": complete_config}
    if options.adapters:
        rows = 1 + arguments["speculative_config"]["num_speculative_tokens"]
        arguments |= {
            # vLLM requires buffers for a proposal of every request at once; a step takes no more than before.
            "max_num_batched_tokens": max(options.max_batch_tokens, MAX_REQUESTS * rows),
            "max_num_scheduled_tokens": options.max_batch_tokens,
            "enable_lora": True,
            # The next block of any session may come at any time: each adapter has a place. vLLM's CPU kernels
            # take the last place for a request without an adapter, which therefore stays empty.
            "max_loras": len(options.adapters) + (device == "cpu"),
            "max_lora_rank": max_rank(options.adapters),
        }
    budget = options.cache_budget_bytes
    if budget is None and device == "cpu":
        import torch

        budget = cache_budget(torch.device("cpu"), None, options.memory_share)
    if budget is not None:
        arguments["kv_cache_memory_bytes"] = budget
    else:
        arguments["gpu_memory_utilization"] = options.memory_share
    return EngineArgs(**arguments).create_engine_config()


def _check_layers(model: Any) -> None:
    """Refuse recurrent layers on a CPU, where vLLM fails in the first forward."""
    if not (model.is_hybrid or model.is_attention_free):
        return
    if _device() == "cpu":
        allowed = "a model without recurrent layers: vLLM's CPU build lacks their kernels"
        raise InvalidArgumentError("model", model.model, allowed)
    _log.warning("%s has recurrent layers, with which rejected tokens were never tested here", model.model)


def _device() -> str:
    """Return the device of the installed vLLM, which is built for one."""
    from vllm.platforms import current_platform

    if current_platform.device_type not in ("cpu", "cuda"):
        raise InvalidArgumentError("engine", "vllm", "a GPU, or vLLM's CPU build: vLLM found no device")
    return "cpu" if current_platform.is_cpu() else "cuda"


def _start_error(options: EngineOptions, error: Exception) -> InvalidArgumentError:
    """Return the typed error for what vLLM raised at start, with the first sentence of its message."""
    text = " ".join(str(error).split())
    lowered = text.lower()
    message = _PREFIX.sub("", re.split(r"(?<=[a-z)])[.;] | \[type=", text, maxsplit=1)[0])[:MAX_MESSAGE]
    if "memory" in lowered and any(words in lowered for words in _OF_MEMORY):
        field = "cache_budget_mb" if options.cache_budget_bytes is not None else "cache_memory_share"
        got = options.memory_share if options.cache_budget_bytes is None else options.cache_budget_bytes >> 20
        allowed = f"enough for one session: {message.replace('GPU memory', 'memory')}"
        return InvalidArgumentError(field, got, allowed)
    if "tensor parallel size" in lowered:
        return InvalidArgumentError("tensor_parallel", options.tensor_parallel, f"a divisor: {message}")
    loads = f"that vLLM {SUPPORTED_VLLM} loads"
    message = f"{type(error).__name__}: {message}"
    if options.head:
        allowed = f"a drafter {loads} with the model {options.model}: {message}"
        return InvalidArgumentError("head", options.head, allowed)
    return InvalidArgumentError("model", options.model, f"a model {loads}: {message}")
