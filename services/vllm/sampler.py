"""Draws and verifies in place of vLLM's sampler, with gammaray's noise, filters, masks and penalties.

The functions are those of the CPU engine, so that a request means the same on both. Sessions with equal
parameters and without edits of their logits share one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gammaray.blocks import Verdict
from gammaray.errors import GammarayError
from gammaray.types import Proposal, SamplingParams, VerificationMethod
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import filter_key, processed_log_probs
from services.scheduling.tasks import SessionSpec
from services.verification.rules import walk
from services.verification.verdicts import judge, token_logprobs
from services.vllm.messages import (
    IS_KEPT,
    SESSION,
    SPEC,
    Masks,
    PostedBlock,
    States,
    Verdicts,
    first_tokens,
)
from services.vllm.noise import NoiseRows, NoiseSource

NO_TOKEN = -1
"""Padding of the emitted tokens, and all that a chunk of a prompt emits."""

UNUSED_TOKEN = 0
"""Emitted for a block without a verdict: vLLM needs a token, and its request ends with the step."""


class PreparedMasks:
    """Stands for a `GrammarState` whose masks were computed elsewhere, `by_path` of the proposal."""

    def __init__(self) -> None:
        self.by_path: Sequence[bytes | None] = ()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Ignore the tokens: the masks are those after them."""

    def truncate(self, length: int) -> None:
        """Ignore the length: the masks are those at it."""

    def masks(self, paths: Sequence[Sequence[int]]) -> list[bytes | None]:
        """Return the masks of these paths, the first ones of those of the proposal."""
        return list(self.by_path[: len(paths)])


class RequestState:
    """A request's session and the edits of its logits, which are processed by `params` if there are any."""

    def __init__(
        self,
        session_id: str,
        spec: SessionSpec,
        params: SamplingParams | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.session_id, self.spec, self.params = session_id, spec, params
        self.masks, self.edits = PreparedMasks(), None
        if params is not None and LogitEdits.needed(params):
            grammar: Any = self.masks if params.grammar else None
            eos, num_prompt = spec.eos_token_ids, spec.prompt_length
            self.edits = LogitEdits(params, eos, num_prompt, vocab_size, device, grammar)

    @property
    def is_drawn(self) -> bool:
        """Whether the best of its scores are its tokens, and depend on no other tokens."""
        is_coupled = self.spec.method is VerificationMethod.COUPLED or self.spec.params.temperature == 0
        return self.edits is None and is_coupled


class StepSampler(ABC):
    """What both samplers keep between steps; `states` are what a head that learns has read in the step.

    Args:
        tokens: Gives the first tokens of a request, of its id and their number.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, tokens: Callable[[str, int], Sequence[int]]
    ) -> None:
        self._vocab_size, self._device, self._tokens = vocab_size, device, tokens
        self.states: States = {}
        self._arguments: dict[str, Any] = {}
        self._states: dict[str, RequestState] = {}
        self._computed: dict[str, int] = {}  # tokens of each request of the step before it
        self._scheduled: dict[str, int] = {}  # tokens that the step feeds
        self._noise = NoiseSource(vocab_size, device)
        self._posted: dict[str, Any] = {}
        self._masks = Masks()
        self._verdicts: Verdicts = {}

    @property
    def num_requests(self) -> int:
        return len(self._states)

    @property
    def num_sessions(self) -> int:
        return self._noise.num_sessions

    def begin(self, step: Any) -> None:
        """Take the blocks of a step, vLLM's `SchedulerOutput`; forget requests and sessions that ended."""
        self._posted, self._verdicts, self.states = getattr(step, "posted", {}), {}, {}
        for request_id in step.finished_req_ids:
            self._arguments.pop(request_id, None)
            self._states.pop(request_id, None)
        for session_id in getattr(step, "ended", ()):
            self._noise.forget(session_id)
        self._scheduled = step.num_scheduled_tokens
        new, cached = step.scheduled_new_reqs, step.scheduled_cached_reqs
        self._arguments |= {each.req_id: each.sampling_params.extra_args or {} for each in new}
        self._computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._computed |= {each.req_id: each.num_computed_tokens for each in new}

    @abstractmethod
    def sample(self, logits: Tensor, request_ids: Sequence[str], drafts: Sequence[int]) -> Tensor:
        """Return the tokens that each request of a step emits, padded, [requests, longest] int32.

        Args:
            logits: [rows, vocab_size]; a request has one row more than draft tokens.
            drafts: The number of draft tokens of each request.
        """

    def take_masks(self, masks: Masks | None) -> None:
        self._masks = masks or Masks()

    def take_verdicts(self) -> Verdicts:
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def _params(self, spec: SessionSpec) -> SamplingParams | None:
        return spec.params

    def _state(self, request_id: str) -> RequestState:
        """Return what is kept of a request; raises InvalidArgumentError if its masks leave no token."""
        state = self._states.get(request_id)
        if state is None:
            arguments = self._arguments[request_id]
            spec, session_id = arguments[SPEC], arguments[SESSION]
            state = RequestState(session_id, spec, self._params(spec), self._vocab_size, self._device)
            self._states[request_id] = state
        return state

    def _edits(self, request_id: str, length: int) -> LogitEdits | GammarayError | None:
        """Return the edits of a request's logits after `length` tokens; None: its masks are late."""
        state = self._states[request_id]
        assert state.edits is not None
        state.edits.follow(self._tokens(request_id, length))
        masks = self._masks.by_request.get(request_id, ())
        if masks is None or isinstance(masks, GammarayError):
            return masks
        state.masks.by_path = masks
        return state.edits


class _Rows(NamedTuple):
    """The rows of one block: the logits [len(proposal) + 1, vocab_size] of request `at` of the batch."""

    at: int
    request_id: str
    session: RequestState
    block: PostedBlock
    proposal: Proposal
    logits: Tensor


class BlockSampler(StepSampler):
    """Takes the place of vLLM's sampling in the process that has the logits; verifies blocks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._emitted: dict[str, int | None] = {}

    def sample(self, logits: Tensor, request_ids: Sequence[str], drafts: Sequence[int]) -> Tensor:
        """Verify the posted blocks of a step."""
        width = max(drafts) + 1
        emitted = [[NO_TOKEN] * width] * len(drafts)
        self._emitted = dict.fromkeys(request_ids)
        for row, tokens in self._serve(request_ids, drafts, logits):
            emitted[row] = tokens + [NO_TOKEN] * (width - len(tokens))
            block = self._posted[request_ids[row]]
            self._emitted[request_ids[row]] = block.base_position + len(tokens)
        return torch.tensor(emitted, dtype=torch.int32, device=logits.device)

    def note_states(self, states: Tensor, first_rows: Sequence[int], hidden_size: int) -> None:
        """Keep the states of committed tokens of the requests that are learnt from.

        Args:
            states: [rows, taps * hidden_size], of the tokens that the step fed.
            first_rows: The first row of each request that was sampled, and the end of the last.
        """
        rows = zip(self._emitted.items(), pairwise(first_rows), strict=False)  # padding may follow
        for (request_id, position), (first, end) in rows:
            if not self._arguments[request_id].get(IS_KEPT):
                continue
            start = self._computed[request_id]
            if position is not None:
                end = min(end, first + position - 1 - start)  # rejected tokens follow
            if end > first:
                kept = states[first:end].to("cpu", torch.bfloat16)
                self.states[request_id] = start, kept.view(end - first, -1, hidden_size)

    def draft(self, logits: Tensor, depth: int, per_request: int) -> Tensor:
        """Return the tokens that a drafter proposes for the requests of the step that was sampled.

        Args:
            logits: [requests * per_request, vocab_size], the drafter's, those of a request together.
            depth: Tokens that were proposed before for each request.
            per_request: Rows of each request.

        Returns:
            [requests * per_request] int64: the argmax, with the session's noise if it is verified by that.
        """
        tokens = logits.argmax(dim=-1)
        alike: dict[tuple[float, ...], list[tuple[int, NoiseRows]]] = {}
        for at, (request_id, position) in enumerate(self._emitted.items()):
            if position is None or at * per_request >= len(tokens):
                continue
            session = self._states.get(request_id)
            if session is None or session.spec.method is not VerificationMethod.COUPLED:
                continue
            params = session.spec.params
            if params.temperature > 0:
                noise = NoiseRows(session.session_id, session.spec, position + depth, per_request)
                alike.setdefault(filter_key(params), []).append((at, noise))
        for group in alike.values():
            rows = [at * per_request + row for at, _ in group for row in range(per_request)]
            scores = processed_log_probs(logits[rows], group[0][1].spec.params)
            tokens[rows] = (scores + self._noise.gumbel([noise for _, noise in group])).argmax(dim=-1)
        return tokens

    def _serve(
        self, request_ids: Sequence[str], drafts: Sequence[int], logits: Tensor
    ) -> list[tuple[int, list[int]]]:
        """Serve the posted blocks; return the index of each request with the tokens that it emits."""
        served: list[tuple[int, list[int]]] = []
        alike: dict[tuple[float, ...], list[_Rows]] = {}
        start = 0
        for at, (request_id, num_drafts) in enumerate(zip(request_ids, drafts, strict=True)):
            here = logits[start : start + num_drafts + 1]
            start += num_drafts + 1
            block = self._posted.get(request_id)
            if block is None:
                continue  # a chunk of a prompt: vLLM discards its token
            if block.known_token_id is not None:
                self._verdicts[request_id] = None
                served.append((at, [block.known_token_id]))
                continue
            # vLLM cuts proposals that do not fit the step: a shorter one is verified.
            proposal = first_tokens(block.proposal, num_drafts)
            try:
                session = self._state(request_id)
            except GammarayError as error:
                self._verdicts[request_id] = error
                served.append((at, [UNUSED_TOKEN]))
                continue
            rows = _Rows(at, request_id, session, block, proposal, here[: len(proposal) + 1])
            if session.is_drawn:
                alike.setdefault(filter_key(session.spec.params), []).append(rows)
            else:
                served.append(self._finish(rows, self._judge(rows)))
        for group in alike.values():
            served += self._draw(group)
        return served

    def _draw(self, group: Sequence[_Rows]) -> list[tuple[int, list[int]]]:
        """Verify blocks of sessions with equal filters, whose tokens are the argmaxes of one tensor."""
        params = group[0].session.spec.params
        logits = torch.cat([rows.logits for rows in group]) if len(group) > 1 else group[0].logits
        if params.temperature > 0:
            noise = [
                NoiseRows(
                    rows.session.session_id, rows.session.spec, rows.block.base_position, len(rows.logits)
                )
                for rows in group
            ]
            scores = processed_log_probs(logits, params) + self._noise.gumbel(noise)
        else:
            scores = logits.float()
        tokens, start, served = best_tokens(scores), 0, []
        for rows in group:
            end = start + len(rows.logits)
            try:
                outcome: Verdict | GammarayError = walk(tokens[start:end], rows.proposal)
            except GammarayError as error:
                outcome = error
            served.append(self._finish(rows, outcome))
            start = end
        return served

    def _judge(self, rows: _Rows) -> Verdict | GammarayError | None:
        """Verify one block by the rule of its session; None: its masks are late."""
        session, base = rows.session, rows.block.base_position
        spec, edits = session.spec, session.edits
        noise = self._noise.of(session.session_id, spec) if spec.params.temperature > 0 else None
        try:
            if edits is not None:
                prepared = self._edits(rows.request_id, base)
                if not isinstance(prepared, LogitEdits):
                    return prepared
            return judge(spec, rows.proposal, rows.logits, base, noise, edits)
        except GammarayError as error:
            return error

    def _finish(self, rows: _Rows, outcome: Verdict | GammarayError | None) -> tuple[int, list[int]]:
        """Note a block's outcome; return the tokens that vLLM appends to its request."""
        if not isinstance(outcome, Verdict):
            self._verdicts[rows.request_id] = outcome
            return rows.at, [UNUSED_TOKEN]
        path, num_top = outcome.accepted_path, rows.block.num_top_logprobs
        emitted = [*(rows.proposal.token_ids[node] for node in path), outcome.next_token_id]
        if num_top is not None:
            logits = rows.logits[[0, *(node + 1 for node in path)]]
            outcome = replace(outcome, logprobs=token_logprobs(logits, emitted, num_top))
        self._verdicts[rows.request_id] = outcome
        return rows.at, emitted


def gather_logprobs(log_probs: Tensor, num_top: int, token_ids: Tensor) -> Any:
    """Return the scores of a prompt's tokens, in place of vLLM's `Sampler.gather_logprobs`.

    That one compiles a kernel when it is first called, for which all sessions would wait seconds, and its
    ranks count equal values.

    Args:
        log_probs: [rows, vocab_size].
        token_ids: [rows], what is scored.

    Returns:
        vLLM's `LogprobsTensors`: column 0 is the scored token, the others are the `num_top` most likely ones.
    """
    from vllm.v1.outputs import LogprobsTensors

    scores, top = log_probs.gather(1, token_ids[:, None]), log_probs.topk(num_top)
    indices = torch.cat((token_ids[:, None], top.indices), dim=1)
    ranks = (log_probs > scores).sum(-1) + 1
    return LogprobsTensors(indices.to(torch.int32), torch.cat((scores, top.values), dim=1), ranks)
