"""Draws a draft's tokens in place of vLLM's sampler, by the functions of the CPU engine's drafts.

The shared noise and the draft's own draws are keyed by absolute position, so that a proposal is the one that
the CPU engine would draft, up to the rounding of the logits. Sessions with equal filters and without edits of
their logits share one call where their tokens are the best of their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gammaray.errors import GammarayError, InternalError
from gammaray.types import SamplingParams
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.logits import filter_key, processed_log_probs
from services.scheduling.tasks import SessionSpec
from services.speculation.predictions import predictions
from services.speculation.predictor import draft_params, edited_log_probs
from services.vllm.messages import DraftBlock, Drafted
from services.vllm.noise import NoiseRows
from services.vllm.sampler import NO_TOKEN, UNUSED_TOKEN, RequestState, StepSampler


class _Row(NamedTuple):
    """The logits [1, vocab_size] after one request's last token."""

    at: int  # index of the request in the batch
    request_id: str
    session: RequestState
    block: DraftBlock
    position: int  # absolute position of the token to draw
    logits: Tensor


class DraftSampler(StepSampler):
    """Takes the place of vLLM's sampling in the process that has the logits; draws a draft's tokens."""

    def sample(self, logits: Tensor, request_ids: Sequence[str], drafts: Sequence[int]) -> Tensor:
        """Draw the next token of each request; no request has draft tokens."""
        tokens = [NO_TOKEN] * len(request_ids)
        alike: dict[tuple[float, ...], list[_Row]] = {}
        for at, request_id in enumerate(request_ids):
            block = self._posted.get(request_id)
            if block is None:
                continue
            try:
                session = self._state(request_id)
            except GammarayError as error:
                self._verdicts[request_id] = error
                tokens[at] = UNUSED_TOKEN
                continue
            position = self._computed[request_id] + self._scheduled[request_id]
            row = _Row(at, request_id, session, block, position, logits[at : at + 1])
            if session.is_drawn:
                alike.setdefault(_alike(session), []).append(row)
            else:
                self._note(row, self._choose(row), tokens)
        for rows in alike.values():
            for row, outcome in zip(rows, self._draw(rows), strict=True):
                self._note(row, outcome, tokens)
        return torch.tensor(tokens, dtype=torch.int32, device=logits.device)[:, None]

    def _note(self, row: _Row, outcome: Drafted | GammarayError, tokens: list[int]) -> None:
        self._verdicts[row.request_id] = outcome
        tokens[row.at] = outcome.token_id if isinstance(outcome, Drafted) else UNUSED_TOKEN

    def _params(self, spec: SessionSpec) -> SamplingParams | None:
        return draft_params(spec)

    def _draw(self, rows: list[_Row]) -> list[Drafted | GammarayError]:
        """Draw for sessions with equal filters, whose tokens are the argmaxes of one tensor."""
        params, is_random = rows[0].session.params, rows[0].session.spec.params.temperature > 0
        scores = torch.cat([row.logits for row in rows]) if len(rows) > 1 else rows[0].logits
        scores = scores.float() if params is None else processed_log_probs(scores, params)
        if is_random:
            noise = [
                NoiseRows(row.session.session_id, row.session.spec, row.position, num_rows=1) for row in rows
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
                edits = self._edits(row.request_id, row.position)
                if isinstance(edits, GammarayError):
                    return edits
                assert edits is not None  # a draft waits for its masks
                logits = edited_log_probs(logits, params, edits, [()])
            elif params is not None:
                logits = processed_log_probs(logits, params)
            (prediction,) = predictions(
                spec.method,
                logits,
                self._noise.of(session.session_id, spec) if spec.params.temperature > 0 else None,
                [row.position],
                temperature=spec.params.temperature,
            )
            return Drafted(prediction.choose(block.base_position), prediction.distribution)
        except GammarayError as error:
            return error


def _alike(session: RequestState) -> tuple[float, ...]:
    """Return what sessions whose scores are computed together have in common."""
    is_random = session.spec.params.temperature > 0
    return (is_random,) if session.params is None else (is_random, *filter_key(session.params))
