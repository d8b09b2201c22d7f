"""Checks receipts by one forward pass each over prompt and emitted tokens (teacher forcing).

The emitted tokens are verified as if they were a proposal, by what verifies proposals in a target worker:
accepted are those that are the target's own draw. A batch of another shape, another kernel or a device
rounds otherwise, so that another token may win where two scores are close: a token counts as well if it is
the argmax after a change of each logit by at most half the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pydantic import ValidationError
from torch import Tensor

from gammaray.checks import check_token_ids
from gammaray.config import TargetSettings, settings_error
from gammaray.demo_pair import resolve_model
from gammaray.errors import GammarayError, InvalidArgumentError, NotFoundError
from gammaray.grammar.matcher import grammar_identity
from gammaray.receipts.receipt import Receipt
from gammaray.types import FinishReason, Proposal, VerificationMethod
from gammaray.vocabulary import Vocabulary
from services.engine.core.batch import SequenceInput
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import eos_token_ids
from services.engine.engine import Engine
from services.engine.loader import load_worker_engine
from services.engine.sampling.draws import best_tokens
from services.engine.sampling.edits import LogitEdits
from services.engine.sampling.logits import edited_logits, processed_log_probs
from services.engine.sampling.noise import Noise
from services.engines.choice import choose
from services.process.fingerprints import vocab_sha256, weights_sha256
from services.scheduling.grammars import Grammars
from services.scheduling.tasks import SessionSpec
from services.verification.verdicts import judge
from services.vocabulary.translation import load_vocabulary

MARGINS = {"float32": 1e-3, "bfloat16": 1.0, "float16": 0.125}
"""Margin by the dtype of a target's arithmetic, in nats of a logit; `python -m benchmarks.receipts` measures
what honest targets need."""

_FEED = 256
"""Tokens of one forward."""

_JUDGED = 2**18
"""Logits processed at once, which fit into a core's cache, in at most 64 rows."""

_SESSION = "receipt"
_MAX_REASON = 500


@dataclass(frozen=True)
class ReceiptVerdict:
    """What the check of a receipt found.

    It is valid if every token follows from checkpoint, prompt, parameters and seed, invalid if one does not,
    and refused if this cannot be checked here. The gap is how far the score log p + noise of `expected` is
    above that of `token`, times the temperature: nats of a logit. With `top_p`, it is at the mass within the
    margin that just keeps `token`.
    """

    result: Literal["valid", "invalid", "refused"]
    reason: str = ""  # why it is invalid or refused
    dtype: str = ""  # of the target's arithmetic, as the receipt names it; empty if it cannot be read
    temperature: float = 0.0  # of the request; 0 where the receipt was refused
    num_tokens: int = 0  # emitted tokens that were checked
    num_ties: int = 0  # of these, how many are the argmax only after a change of logits within the margin
    largest_gap: float = 0.0  # the largest gap of these, at most the margin
    margin: float = 0.0  # how far two logits may move towards each other to make a token the argmax
    position: int | None = None  # index of the first wrong token among the emitted ones
    token: int | None = None  # the wrong one
    expected: int | None = None  # the token in its place
    gap: float | None = None  # None: `token` cannot be drawn


def refusal(error: Exception, dtype: str = "") -> ReceiptVerdict:
    """Return the verdict on a receipt that cannot be checked because of an error."""
    kind = "" if isinstance(error, GammarayError) else f"{type(error).__name__}: "
    return ReceiptVerdict("refused", f"{kind}{error}"[:_MAX_REASON], dtype)


def _loaded(name: str, path: str) -> Engine:
    """Load a target as its worker would, but by an engine that computes given rows."""
    try:
        settings = TargetSettings(model=name)
        serving = settings.model_copy(update={"lora": "", "tensor_parallel": 1})  # of no effect here
        if not choose(serving).facts.checks_receipts:
            settings = settings.model_copy(update={"engine": "transformers"})
        return load_worker_engine(path, settings)
    except ValidationError as error:
        raise settings_error(error) from None
    except NotFoundError as error:
        raise InvalidArgumentError("target", name, f"a model that can be loaded ({error})") from None
    except UnsupportedModelError as error:
        raise InvalidArgumentError("target", name, f"a model that can be served: {error.reason}") from None


class ReceiptChecker:
    """Checks receipts against one checkpoint, loaded as a worker with the settings of the environment does.

    Two logits may move towards each other by `margin`; None: by the receipt's dtype (`MARGINS`).
    """

    def __init__(self, target: str, margin: float | None = None) -> None:
        self._path, self._margin = resolve_model(target, "target"), margin
        self.engine = _loaded(target, self._path)
        self._weights, self._tokenizer = weights_sha256(self._path), vocab_sha256(self._path)
        self._eos = eos_token_ids(self._path)
        self._grammars = Grammars(self._path, self.engine.vocab_size)

    def verdict(self, receipt: Receipt) -> ReceiptVerdict:
        """Return what the check of a receipt finds; any error is the reason of a refusal."""
        try:
            margin = self._checked_margin(receipt)
            if reason := self._wrong_end(receipt):
                return ReceiptVerdict("invalid", reason, receipt.dtype, margin=margin)
            return _Pass(self.engine, receipt, margin, self._grammars).run()
        except Exception as error:  # a receipt is of another program, and the others are to be checked
            return refusal(error, receipt.dtype)

    def _checked_margin(self, receipt: Receipt) -> float:
        """Check that the receipt is for this checkpoint; return the margin."""
        weights, *_ = receipt.model_identity.split("/")
        dtype = receipt.dtype
        facts = {
            "verification": (receipt.verification, VerificationMethod.COUPLED),
            "model_identity": (weights or "none", self._weights),
            "tokenizer": (receipt.tokenizer, self._tokenizer),
            "eos_token_ids": (set(receipt.eos_token_ids), set(self._eos) or set(receipt.eos_token_ids)),
            "grammars": (receipt.grammars, grammar_identity() if receipt.sampling.grammar else ""),
        }
        for field, (got, expected) in facts.items():
            if got != expected:
                raise InvalidArgumentError(field, got, f"{expected}, that of the target here")
        if "lora" in receipt.model_identity.split("/")[2:]:
            raise InvalidArgumentError("model_identity", "a LoRA adapter", "a model without one")
        if self._margin is None and dtype not in MARGINS:
            allowed = f"a dtype of {', '.join(MARGINS)}, or a margin"
            raise InvalidArgumentError("model_identity", dtype, allowed)
        for field in ("prompt_token_ids", "token_ids"):
            check_token_ids(field, getattr(receipt, field), self.engine.vocab_size)
        length = len(receipt.prompt_token_ids) + len(receipt.token_ids)
        if not receipt.prompt_token_ids or length > self.engine.max_context:
            allowed = f"up to {self.engine.max_context} with the prompt (context), and a prompt"
            raise InvalidArgumentError("token_ids", f"{length} tokens with the prompt", allowed)
        return MARGINS[dtype] if self._margin is None else self._margin

    def _wrong_end(self, receipt: Receipt) -> str:
        """Return why the completion cannot have ended as the receipt says; empty if it can."""
        tokens, ends = receipt.token_ids, set(receipt.stop_token_ids)
        if not receipt.ignore_eos:
            ends.update(receipt.eos_token_ids)
        stopped, size = self._stop_at(receipt), len(tokens)
        ended = next((at for at, token in enumerate(tokens) if token in ends or at == stopped), size)
        if ended < size - 1:
            return f"the completion went on after token {ended}, which ends it"
        can_end = {
            FinishReason.STOP: ended < size,
            FinishReason.LENGTH: size == receipt.max_tokens,
            FinishReason.CANCELLED: True,
        }
        if size > receipt.max_tokens or not can_end.get(receipt.finish_reason):
            end = receipt.finish_reason.value
            return f"{size} tokens of at most {receipt.max_tokens} do not end by {end}"
        return ""

    def _stop_at(self, receipt: Receipt) -> int | None:
        """Return the first token with which the text contains a stop string; None if there is none.

        Where the bytes of a token are not known, or a stop string has the character that stands for bytes
        that are no text, it may be the last token.
        """
        stops, tail = [stop.encode() for stop in receipt.stop], b""
        last = len(receipt.token_ids) - 1
        if not stops:
            return None
        if self._vocabulary is None or any("\ufffd" in stop for stop in receipt.stop):
            return last
        special, longest = set(self._vocabulary.specials.values()), max(map(len, stops))
        for at, token in enumerate(receipt.token_ids):
            if not (added := self._vocabulary.bytes_of([token])) and token not in special:
                return last
            tail = tail[-longest:] + added
            if any(stop in tail for stop in stops):
                return at
        return None

    @cached_property
    def _vocabulary(self) -> Vocabulary | None:
        try:
            return load_vocabulary(self._path, "target")
        except InvalidArgumentError:  # of another kind than byte-level and SentencePiece
            return None


class _Pass:
    def __init__(self, engine: Engine, receipt: Receipt, margin: float, grammars: Grammars) -> None:
        self._engine, self._receipt, self._half = engine, receipt, margin / 2
        prompt, params = receipt.prompt_token_ids, receipt.sampling
        self._tokens, self._num_prompt = [*prompt, *receipt.token_ids], len(prompt)
        ends = tuple(sorted({*receipt.eos_token_ids, *receipt.stop_token_ids}))
        self._spec = SessionSpec(params, receipt.verification, len(prompt), ends)
        self._spec.validate(len(prompt), engine.vocab_size)
        size, device = engine.vocab_size, engine.device
        self._num_judged = min(64, max(1, _JUDGED // size))
        assert params.seed is not None
        self._noise = Noise(params.seed, params.sample_index, size, device) if params.temperature else None
        self._edits = None
        if LogitEdits.needed(params):
            state = grammars.begin(params.grammar, ends) if params.grammar else None
            self._edits = LogitEdits(params, ends, len(prompt), size, device, state)
        self._verdict = ReceiptVerdict(
            "valid", dtype=receipt.dtype, temperature=params.temperature, margin=margin
        )

    def run(self) -> ReceiptVerdict:
        """Return the verdict; it ends with the first wrong token."""
        last = len(self._tokens) - 1
        try:
            for start in range(0, last, _FEED):
                end = min(start + _FEED, last)
                first = max(start, self._num_prompt - 1)
                feed = SequenceInput(_SESSION, start, self._tokens[start:end], max(0, end - first))
                (logits,) = self._engine.step([feed])
                for at in range(first, end, self._num_judged):
                    if not self._follow(logits[at - first :], at + 1, min(at + self._num_judged, end) + 1):
                        return self._verdict
        finally:
            self._engine.release(_SESSION)
        return self._verdict

    def _follow(self, logits: Tensor, start: int, end: int) -> bool:
        """Check the tokens at positions [start, end) by their rows; return whether all follow."""
        at = start
        while at < end:
            row = logits[at - start : end - start]
            if self._edits is not None:
                self._edits.follow(self._tokens[:at])
            proposal = Proposal(tuple(self._tokens[at : end - 1]))
            verdict = judge(self._spec, proposal, row, at, self._noise, self._edits)
            at += len(verdict.accepted_path)
            if verdict.next_token_id != self._tokens[at] and not self._is_tie(logits[at - start], at):
                return False
            at += 1
            self._note(num_tokens=at - self._num_prompt)
        return True

    def _is_tie(self, row: Tensor, at: int) -> bool:
        """Note the wrong token at a position, and return whether it is within the margin."""
        if self._edits is not None:
            self._edits.follow(self._tokens[:at])
        token, logits = self._tokens[at], edited_logits(row[None], self._edits, [()])
        (expected,) = best_tokens(self._scores(logits, at))
        scores = self._scores(logits, at, is_lenient=True)
        gap = float(scores.amax() - scores[0, token]) * (self._receipt.sampling.temperature or 1.0)
        if self._can_win(logits.clone(), at):
            largest = max(self._verdict.largest_gap, min(gap, 2 * self._half))
            self._note(num_ties=self._verdict.num_ties + 1, largest_gap=largest)
            return True
        number = at - self._num_prompt
        reason = f"token {number} is {token}, expected {expected}"
        wrong = {"position": number, "token": token, "expected": expected}
        known = gap if math.isfinite(gap) else None
        self._note(result="invalid", reason=reason, num_tokens=number, gap=known, **wrong)
        return False

    def _can_win(self, logits: Tensor, at: int) -> bool:
        """Whether the token at a position is the argmax after small changes, made to `logits` [1, vocab]."""
        token, lowered = self._tokens[at], set[int | None]()
        logits[0, token] += self._half
        while True:
            (best,) = best_tokens(self._scores(logits, at, is_lenient=True))
            if best in lowered or best is None or best == token:
                return best == token
            lowered.add(best)  # one after another of those that win in its place
            logits[0, best] -= self._half

    def _scores(self, logits: Tensor, at: int, *, is_lenient: bool = False) -> Tensor:
        """Return log p + noise of edited logits [1, vocab]; at temperature 0 the logits.

        Where all logits change by at most half the margin, the mass of the likeliest tokens changes by at
        most a quarter of it. With `is_lenient`, `top_p` changes by as much towards the mass that just keeps
        the token at the position: with fewer others it wins more often.
        """
        params = self._receipt.sampling
        if self._noise is None:
            return logits
        if is_lenient and params.top_p < 1:
            probs = processed_log_probs(logits, replace(params, top_p=1.0))[0].double().exp()
            probs[self._tokens[at]], prob = 0.0, float(probs[self._tokens[at]])
            needed, spread = float(probs[probs >= prob].sum()) + 1e-6, self._half / 2 / params.temperature
            top_p = min(max(needed, params.top_p - spread, 1e-9), params.top_p + spread, 1.0)
            params = replace(params, top_p=top_p)
        return processed_log_probs(logits, params) + self._noise.gumbel(at, 1)

    def _note(self, **values: Any) -> None:
        self._verdict = replace(self._verdict, **values)
