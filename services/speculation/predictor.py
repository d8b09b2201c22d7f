"""The draft model of a drafter, and what its logits predict for a session.

The noise, masks, bias and penalties are those of the target's token ids and absolute positions. A draft model
with another vocabulary drafts the tokens that it shares with the target (TLI, arXiv 2502.05202): its logits
are mapped to these, and everything else is as for any other draft model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gammaray.types import SamplingParams, VerificationMethod
from services.engine.engine import Engine
from services.engine.sampling.edits import LogitEdits, counts_tokens
from services.engine.sampling.logits import processed_log_probs
from services.engine.sampling.noise import Noise
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import SessionSpec
from services.speculation.calibration import Calibration
from services.speculation.predictions import NOTHING, WEIGHT_BITS, Prediction, predictions
from services.vocabulary.intersection import SharedTokens
from services.vocabulary.translation import Translation

Paths = Callable[[], Iterable[Sequence[int]]]
"""Computes the tokens between the committed ones and each row."""


class DraftModel:
    """A draft model or head, and what all its sessions have in common.

    Args:
        bits: Rejection: the sum of a shipped distribution's weights is 2^bits.
        translation: The vocabularies, if the target's is another one.

    Attributes:
        calibration: Of all sessions.
        reduced: The tokens of the logits, of a head with fewer rows; None: the whole vocabulary.
        shared: The tokens that it can draft for a target of another vocabulary; None: all.
    """

    def __init__(
        self, engine: Engine, *, bits: int = WEIGHT_BITS, translation: Translation | None = None
    ) -> None:
        self.engine, self.bits, self.translation = engine, bits, translation
        self.calibration = Calibration()
        self.reduced = engine.keep_reduced() if translation is None else None
        self.shared = None if translation is None else SharedTokens(translation.common, engine.device)


class Predictor:
    """Predicts the next tokens of one session from the draft's logits.

    Args:
        session: The session; another spec needs another predictor.

    Attributes:
        is_gumbel_max: Whether the draft's choice is its prediction of the target's token, not an independent
            draw. Only then do the committed tokens show whether each choice was right, tested or not.
        counts_tokens: Whether a prediction depends on the tokens before it through more than the logits.
    """

    def __init__(self, model: DraftModel, session: SessionCopy) -> None:
        self._model, self._session = model, session
        spec = session.spec
        self._params = draft_params(spec)
        self.counts_tokens = self._params is not None and counts_tokens(self._params)
        self.is_gumbel_max = spec.method is VerificationMethod.COUPLED or spec.params.temperature == 0
        self._source: Noise | None = None
        self._noise: Noise | None = None
        session.edits = None

    def predict(self, logits: Tensor, positions: Sequence[int], paths: Paths) -> list[Prediction]:
        """Return the predictions of the tokens at `positions`, after these paths below the root.

        Args:
            logits: [positions, rows of the head].
            positions: Absolute positions.
            paths: The tokens between the committed ones and each position.
        """
        session, model = self._session, self._model
        noise = session.noise
        token_ids: Tensor | None = None
        if model.shared is not None:
            logits, token_ids, noise = model.shared.of(logits), model.shared.target_ids, self._shared_noise()
        elif model.reduced is not None:
            # Tokens that the head lacks have probability 0: filters keep the same ones without them.
            if self.is_gumbel_max and (self._params is None or not LogitEdits.needed(self._params)):
                token_ids = model.reduced.target_ids
            else:
                logits = model.reduced.with_all_tokens(logits)
        if self._params is not None:
            logits = self._processed(paths, logits, self._params)
        if model.shared is not None and not bool((logits > -math.inf).any()):
            return [NOTHING] * len(positions)  # the parameters allow none of the shared tokens
        return predictions(
            session.spec.method,
            logits,
            noise,
            positions,
            temperature=session.spec.params.temperature,
            bits=model.bits,
            token_ids=token_ids,
        )

    def _processed(self, paths: Paths, logits: Tensor, params: SamplingParams) -> Tensor:
        """Return the processed log-probabilities after paths, [paths, tokens]."""
        if not LogitEdits.needed(params):
            return processed_log_probs(logits, params, is_normalised=not self.is_gumbel_max)
        shared = self._model.shared
        size = logits.shape[-1] if shared is None else shared.target_size
        edits = self._session.edits_for(params, size, logits.device)
        if shared is None:
            return edited_log_probs(logits, params, edits, list(paths()))
        edited = edits.apply(shared.with_all_tokens(logits), list(paths()))[:, shared.target_ids]
        return processed_log_probs(edited, params) if bool((edited > -math.inf).any()) else edited

    def _shared_noise(self) -> Noise | None:
        """Return the session's noise of the shared tokens only, which takes less time."""
        source, shared = self._session.noise, self._model.shared
        assert shared is not None
        if source is not self._source:
            ids = shared.target_ids
            self._source = source
            self._noise = source and Noise(source.seed, source.sample_index, len(ids), ids.device, ids)
        return self._noise


def draft_params(spec: SessionSpec) -> SamplingParams | None:
    """Parameters for processing the draft's logits; None when the plain logits give the same choice.

    At temperature 0 only the argmax counts; a temperature of 1 without filters keeps it and leaves a
    distribution from which the confidence can be read. Gumbel-max draws need no normalised distribution.
    """
    params = spec.params
    if params.temperature == 0:
        params = replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    elif spec.method is not VerificationMethod.COUPLED:
        return params
    plain: Any = SamplingParams(seed=params.seed, sample_index=params.sample_index)
    return None if params == plain else params


def edited_log_probs(
    logits: Tensor, params: SamplingParams, edits: LogitEdits, paths: Sequence[Sequence[int]]
) -> Tensor:
    """Return a draft's log-probabilities with a session's edits, also where these leave no token.

    Args:
        logits: [rows, vocab_size].
        params: As of `draft_params`.
        edits: Those by `params`, updated to the committed tokens.
        paths: For each row, the tokens between the committed ones and the row.
    """
    log_probs = processed_log_probs(logits, params, edits, paths)
    for row in edits.empty_rows:  # the target refuses whatever is proposed there
        log_probs[row] = -math.inf
        log_probs[row, 0] = 0.0
    return log_probs
