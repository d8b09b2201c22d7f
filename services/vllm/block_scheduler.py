"""vLLM's scheduler, in which a request runs only while a block is posted for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from services.vllm.messages import BeginMasks, DraftBlock, Masks, PostedBlock, States, Verdicts, no_masks

_NEVER = 1 << 62
"""A step that no request reaches: vLLM skips a request whose `next_decode_eligible_step` lies ahead."""


class BlockScheduler(Scheduler):  # type: ignore[misc]  # vLLM's classes are not typed here
    """Pauses each request after its prompt and after each block.

    Proposals become the request's draft tokens; roll-back, KV blocks, chunked prefill and the prefix cache
    are vLLM's own. The request of a draft runs in every step from its block on, a token each, until it is
    paused or aborted. What the sampler needs of a block travels on the `SchedulerOutput`, its verdict on the
    `ModelRunnerOutput`.

    Requests with a posted block run oldest block first. vLLM takes memory from the last of its list, in which
    paused requests follow, least recently used last.

    Attributes:
        begin_masks: Set for each step, see `services.vllm.messages.BeginMasks`.
        num_scheduled: Tokens that the last step fed, by request.
        ended: Sessions that have ended since the last step.
        states: Of the last step, see `services.vllm.sampler.StepSampler`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin_masks: BeginMasks = no_masks
        self.num_scheduled: dict[str, int] = {}
        self.ended: list[str] = []
        self._posted: dict[str, Any] = {}  # oldest first; PostedBlock until it runs, or DraftBlock of a draft
        self._masks: Callable[[], Masks] | None = None
        self._verdicts: Verdicts = {}
        self.states: States = {}
        self._announced: set[str] = set()

    def post(self, request_id: str, block: PostedBlock | DraftBlock) -> None:
        """Let a request run: a target's once, with the block's proposal as its draft tokens.

        A request that has not been prefilled yet takes no draft tokens.
        """
        self._posted[request_id] = block
        if isinstance(block, PostedBlock):
            self.update_draft_token_ids(DraftTokenIds([request_id], [list(block.proposal.token_ids)]))
        self.pause(request_id, is_paused=False)

    def pause(self, request_id: str, *, is_paused: bool) -> None:
        """Stop a request for some steps, or let it go on; it keeps its cache."""
        self.requests[request_id].next_decode_eligible_step = _NEVER if is_paused else 0

    def withdraw(self, request_id: str) -> None:
        """Forget the block that was posted for a request."""
        self._posted.pop(request_id, None)

    def take_verdicts(self) -> Verdicts:
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def recover(self) -> bool:
        """Undo a step that failed, once all requests are closed; return whether that was possible.

        The workers may not know of the requests that ended before it, and the cache names blocks that
        they did not compute.
        """
        self._posted, self._verdicts, self._masks = {}, {}, None
        self.finished_req_ids |= self._announced
        return bool(self.kv_cache_manager.reset_prefix_cache())

    def preempted(self) -> list[str]:
        """Return the requests whose blocks vLLM took away."""
        return [name for name, request in self.requests.items() if request.status is RequestStatus.PREEMPTED]

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and attach the blocks whose rows it computes."""
        ages = {request_id: age for age, request_id in enumerate(self._posted)}
        self.running.sort(key=lambda request: ages.get(request.request_id, len(ages)))
        # NOTE: otherwise a new request with one token left to compute is padded to the longest proposal.
        most = int(self.vllm_config.num_speculative_tokens)
        self.num_spec_tokens = 0
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.num_spec_tokens = most
        output.num_spec_tokens_to_schedule = most
        self._announced |= output.finished_req_ids
        self.num_scheduled = dict(output.num_scheduled_tokens)
        self.running.sort(key=lambda request: request.request_id not in self.num_scheduled)
        posted = {
            request_id: self._posted[request_id]
            for request_id in output.num_scheduled_tokens
            if request_id in self._posted and not self.requests[request_id].is_prefill_chunk
        }
        for request_id, block in posted.items():
            if isinstance(block, PostedBlock):
                del self._posted[request_id]
        self._masks = self.begin_masks(posted)  # where it fails, the next step names the ended sessions
        output.posted, output.ended, self.ended = posted, self.ended, []
        config = self.vllm_config.speculative_config
        if config is not None and config.method not in ("medusa", "custom_class", "ngram"):
            # Medusa's heads are all computed at once; others read new tokens even if they draft none.
            depths = [block.draft_depth for block in posted.values()]
            output.num_spec_tokens_to_schedule = min(max(depths, default=0), most)
        return output

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Masks | None:
        """Return the masks of gammaray's own grammars, computed while the forward runs."""
        return None if self._masks is None else self._masks()

    def update_from_output(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> Any:
        self._verdicts.update(getattr(output, "verdicts", {}))
        self.states = getattr(output, "states", {})
        self._announced.clear()
        return super().update_from_output(scheduler_output, output)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            is_draft = isinstance(self._posted.get(request_id), DraftBlock)
            if not (is_draft or self.requests[request_id].is_prefill_chunk):
                self.pause(request_id, is_paused=True)


class NoProposer:
    """Proposes nothing: vLLM reserves slots for draft tokens only where a proposer is configured."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return no draft tokens for each request."""
        return [[] for _ in sampled_token_ids]
