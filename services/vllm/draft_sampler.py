"""Draws a draft's tokens in place of vLLM's sampler, by the functions of the CPU engine's drafts.

The shared noise and the draft's own draws are keyed by absolute position, so that a proposal is the one that
the CPU engine would draft, up to the rounding of the logits. Sessions with equal filters and without edits of
their logits share one call where their tokens are the best of their scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gammaray.errors import GammarayError, InternalError
from gammaray.types import VerificationMethod
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import filter_key, processed_log_probs
from services.scheduling.tasks import SessionSpec
from services.speculation.predictions import predictions
from services.speculation.session import draft_params, edited_log_probs
from services.verification.rules import best_tokens
from services.vllm.messages import DraftBlock, Drafted, Masks, Verdicts
from services.vllm.noise import NoiseRows, NoiseSource
from services.vllm.sampler import SPEC, UNUSED_TOKEN, GivenMasks

__all__ = ["DraftSampler"]


class _Session:
    """What the sampler keeps of a request: its spec, how its logits are processed, and their edits."""

    def __init__(self, spec: SessionSpec, vocab_size: int, device: torch.device) -> None:
        self.spec, self.masks, self.edits = spec, GivenMasks(), None
        self.params = draft_params(spec)
        if self.params is not None and LogitEdits.needed(self.params):
            grammar: Any = self.masks if self.params.grammar else None
            self.edits = LogitEdits(
                self.params, spec.eos_token_ids, spec.prompt_length, vocab_size, device, grammar
            )

    @property
    def is_drawn(self) -> bool:
        """Whether its token is the best of its scores, which depend on no other tokens."""
        spec = self.spec
        is_coupled = spec.method is VerificationMethod.COUPLED or spec.params.temperature == 0
        return self.edits is None and is_coupled

    @property
    def alike(self) -> tuple[float, ...]:
        """What sessions whose scores are computed together have in common."""
        params, is_random = self.params, self.spec.params.temperature > 0
        if params is None:
            return (is_random,)
        return is_random, *filter_key(params)


class _Row(NamedTuple):
    """The logits after one request's last token.

    Args:
        at: Index of the request in the batch.
        position: Absolute position of the token to draw.
        logits: [1, vocab_size].
    """

    at: int
    request_id: str
    session: _Session
    block: DraftBlock
    position: int
    logits: Tensor


class DraftSampler:
    """Replaces `GPUModelRunner._sample` in the process that has the logits.

    Args:
        runner: vLLM's model runner, whose batch says which rows are whose.
        vocab_size: Number of token ids.
    """

    def __init__(self, runner: Any, vocab_size: int) -> None:
        self._runner, self._vocab_size = runner, vocab_size
        self._sessions: dict[str, _Session] = {}
        self._noise = NoiseSource(vocab_size, runner.device)
        self._posted: dict[str, DraftBlock] = {}
        self._masks = Masks()
        self._verdicts: Verdicts = {}

    def begin(self, posted: dict[str, DraftBlock]) -> None:
        """Take the blocks of the step that begins, and forget requests that vLLM has forgotten."""
        self._posted, self._verdicts = posted, {}
        for request_id in self._sessions.keys() - self._runner.requests.keys():
            del self._sessions[request_id]

    def take_masks(self, masks: Masks | None) -> None:
        """Take the masks of the step's grammars."""
        self._masks = masks or Masks()

    def take_verdicts(self) -> Verdicts:
        """Return the tokens of the step's requests."""
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    def sample(self, logits: Tensor, spec_decode_metadata: Any) -> Any:
        """Return the next token of each request, as vLLM's `SamplerOutput`.

        Args:
            logits: [requests, vocab_size].
            spec_decode_metadata: None: no request has draft tokens.
        """
        from vllm.v1.outputs import SamplerOutput

        assert spec_decode_metadata is None
        batch = self._runner.input_batch
        tokens = [UNUSED_TOKEN] * batch.num_reqs  # vLLM discards those of chunks of a prompt
        alike: dict[tuple[float, ...], list[_Row]] = {}
        for at, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
            block = self._posted.get(request_id)
            if block is None:
                continue
            try:
                session = self._session(request_id)
            except GammarayError as error:
                self._verdicts[request_id] = error
                continue
            position = int(batch.num_tokens_no_spec[at])
            row = _Row(at, request_id, session, block, position, logits[at : at + 1])
            if session.is_drawn:
                alike.setdefault(session.alike, []).append(row)
            else:
                self._note(row, self._choose(row), tokens)
        for rows in alike.values():
            for row, outcome in zip(rows, self._draw(rows), strict=True):
                self._note(row, outcome, tokens)
        emitted = torch.tensor(tokens, dtype=torch.int32)[:, None]
        return SamplerOutput(sampled_token_ids=emitted.to(logits.device), logprobs_tensors=None)

    def _note(self, row: _Row, outcome: Drafted | GammarayError, tokens: list[int]) -> None:
        self._verdicts[row.request_id] = outcome
        if isinstance(outcome, Drafted):
            tokens[row.at] = outcome.token_id

    def _session(self, request_id: str) -> _Session:
        """Return what is kept of a request; raises InvalidArgumentError if its masks leave no token."""
        found = self._sessions.get(request_id)
        if found is None:
            spec = self._runner.requests[request_id].sampling_params.extra_args[SPEC]
            found = self._sessions[request_id] = _Session(spec, self._vocab_size, self._runner.device)
        return found

    def _draw(self, rows: list[_Row]) -> list[Drafted | GammarayError]:
        """Draw for sessions with equal filters, whose tokens are the argmaxes of one tensor."""
        params, is_random = rows[0].session.params, rows[0].session.spec.params.temperature > 0
        scores = torch.cat([row.logits for row in rows]) if len(rows) > 1 else rows[0].logits
        scores = scores.float() if params is None else processed_log_probs(scores, params)
        if is_random:
            noise = [
                NoiseRows(_key(row.session.spec), row.session.spec, row.position, num_rows=1) for row in rows
            ]
            scores = scores + self._noise.gumbel(noise)
        broken = InternalError("the draft model's logits are not finite numbers")
        return [broken if token_id is None else Drafted(token_id) for token_id in best_tokens(scores)]

    def _choose(self, row: _Row) -> Drafted | GammarayError:
        """Draw for one session by its method, and return the distribution that it may need."""
        session, spec, block = row.session, row.session.spec, row.block
        params = session.params
        try:
            logits = row.logits.float()
            if params is not None and session.edits is not None:
                tokens = self._runner.input_batch.token_ids_cpu[row.at, : row.position].tolist()
                session.edits.follow(tokens)
                masks = self._masks.by_request.get(row.request_id, ())
                if isinstance(masks, GammarayError):
                    return masks
                session.masks.given = masks
                logits = edited_log_probs(logits, params, session.edits, [()])
            elif params is not None:
                logits = processed_log_probs(logits, params)
            (prediction,) = predictions(
                spec.method,
                logits,
                self._noise.of(_key(spec), spec) if spec.params.temperature > 0 else None,
                [row.position],
                temperature=spec.params.temperature,
                top_k=block.top_k,
                bits=block.weight_bits,
            )
            return Drafted(prediction.choose(block.base_position), prediction.distribution)
        except GammarayError as error:
            return error


def _key(spec: SessionSpec) -> str:
    """Return the name of a session's noise, which it keeps although each proposal is another request."""
    return f"{spec.params.seed} {spec.params.sample_index}"
