"""OpenAI's response objects, whole and streamed, with log-probabilities and the extra object `gammaray`."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias, cast

from gammaray.client.completion import speculation_object
from gammaray.types import (
    Chunk,
    EmittedToken,
    FinishReason,
    PromptLogprobs,
    SpeculationSummary,
    TokenOrigin,
    Usage,
)
from orchestrator.api.http import response_types as types
from orchestrator.api.http.json_text import EncodedList
from orchestrator.api.http.models import StreamOptions
from orchestrator.api.http.requests import ChoicePlan, check_num_logprobs, check_size
from orchestrator.api.http.tools.parser import ArgumentText, CallBegun, CallEvent, PlainText, joined
from orchestrator.api.http.tools.reading import CallReader
from orchestrator.text.detokenizer import num_chars
from orchestrator.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""OpenAI's substitute for minus infinity, which JSON cannot represent."""

_BEFORE = Chunk("", "")


class CompletionLogprobs:
    """The format of /v1/completions: parallel lists, and offsets into the text, after the echoed text.

    `text_offset` of a token is the number of characters that the preceding tokens complete.
    """

    def __init__(self, plan: ChoicePlan, tokenizer: Tokenizer) -> None:
        self._echo, self._num_top, self._tokenizer = plan.echo, plan.echo_logprobs, tokenizer
        self._num_chars = len(plan.echo)

    def render(
        self, tokens: Sequence[EmittedToken], prompt: PromptLogprobs | None = None
    ) -> types.CompletionLogprobs:
        """Return the JSON object for the next tokens, after those of an echoed prompt.

        A prompt's first token has no log-probability.
        """
        spelled: list[bytes] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if prompt is not None and self._num_top is not None:
            spell = self._tokenizer.token_bytes
            spelled += map(spell, prompt.token_ids)
            logprobs += [None, *map(_finite, prompt.logprobs)]
            top.append(None)
            for entry, logprob in enumerate(prompt.logprobs):
                others = {_text(spell(i)): _finite(p) for i, p in prompt.top(entry, self._num_top)}
                top.append({**others, _text(spelled[entry + 1]): _finite(logprob)})
            offsets = self._echoed_offsets(prompt)
        for token in tokens:
            offsets.append(self._num_chars)
            self._num_chars += num_chars(token.token_bytes)
        spelled += [token.token_bytes for token in tokens]
        return {
            "tokens": [*map(_text, spelled)],
            "token_logprobs": [*logprobs, *(_finite(token.logprob) for token in tokens)],
            "top_logprobs": [*top, *map(_top, tokens)],
            "text_offset": offsets,
        }

    def _echoed_offsets(self, prompt: PromptLogprobs) -> list[int]:
        offsets, offset = [], 0
        for token_id in prompt.token_ids:
            offsets.append(offset)
            token_bytes = self._tokenizer.token_bytes(token_id)
            # A prompt given as text may contain special tokens; decoded token ids omit them.
            is_shown = not self._tokenizer.is_special(token_id) or self._echo.startswith(
                _text(token_bytes), offset
            )
            if is_shown:
                offset = min(offset + num_chars(token_bytes), len(self._echo))
        return offsets


class ChatLogprobs:
    """The format of /v1/chat/completions: one object per token."""

    def render(
        self, tokens: Sequence[EmittedToken], prompt: PromptLogprobs | None = None
    ) -> types.ChatLogprobs:
        """Return the JSON object for the next tokens; chat prompts are never echoed."""
        content: list[types.ChatTokenLogprob] = [
            {
                **_entry(token.token_bytes, token.logprob),
                "top_logprobs": [_entry(top.token_bytes, top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


LogprobFormat: TypeAlias = CompletionLogprobs | ChatLogprobs
"""Renders the log-probabilities of a choice's tokens as they come."""


def prompt_entries(
    prompt: PromptLogprobs, num_top: int, spell: Callable[[int], bytes]
) -> types.PromptLogprobs:
    """Return vLLM's `prompt_logprobs`: per position the prompt's token and the most likely ones, by token id.

    The first entry is null, as the first token has no preceding context.
    """
    entries: types.PromptLogprobs = [None]
    for entry, (token_id, logprob) in enumerate(zip(prompt.token_ids[1:], prompt.logprobs, strict=True)):
        top = enumerate(prompt.top(entry, num_top), start=1)
        ranked = {other: (value, rank) for rank, (other, value) in top}
        ranked.setdefault(token_id, (logprob, prompt.ranks[entry]))
        entries.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": spell(other).decode("utf-8", "replace"),
                }
                for other, (value, rank) in ranked.items()
            }
        )
    return entries


def _entry(token_bytes: bytes, logprob: float | None) -> types.TokenLogprob:
    return {"token": _text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _top(token: EmittedToken) -> dict[str, float]:
    """Return the most likely tokens and, as OpenAI does, the emitted token."""
    top = {_text(top.token_bytes): _finite(top.logprob) for top in token.top_logprobs}
    return {**top, _text(token.token_bytes): _finite(token.logprob)}


def _finite(logprob: float | None) -> float:
    return _LOWEST if logprob is None else max(logprob, _LOWEST)


def _text(token_bytes: bytes) -> str:
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:  # a part of a character, written as OpenAI does
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


class WholeLogprobs:
    """The log-probabilities of a whole choice, encoded as its tokens arrive, in a tenth of their memory."""

    def __init__(self, form: LogprobFormat) -> None:
        self._form = form
        self._fields = _encoded(form.render(()))

    @property
    def num_bytes(self) -> int:
        return sum(items.num_bytes for items in self._fields.values() if isinstance(items, EncodedList))

    def add(self, tokens: Sequence[EmittedToken]) -> None:
        for name, items in self._form.render(tokens).items():
            if isinstance(items, list):
                self._fields[name].extend(items)

    def after(self, prompt: PromptLogprobs | None) -> dict[str, Any]:
        """Return the JSON object of all tokens, preceded by those of an echoed prompt."""
        if prompt is None:
            return self._fields
        whole = _encoded(self._form.render((), prompt))
        for name, items in self._fields.items():
            if isinstance(items, EncodedList):
                whole[name].extend(items)
        return whole


def _encoded(logprobs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: EncodedList(one) if isinstance(one, list) else one for name, one in logprobs.items()}


@dataclass
class ChoiceState:
    """The output of one choice: `add` collects what last events need, `keep` the rest of a whole response."""

    plan: ChoicePlan
    logprobs: LogprobFormat | None
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    origins: list[TokenOrigin] = field(default_factory=list)
    text: bytearray = field(default_factory=bytearray)
    last: Chunk = _BEFORE  # as sent to the client
    is_opened: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    calls: CallReader | None = None
    new_events: list[CallEvent] = field(default_factory=list)
    """Text and calls of the last chunk, if the message may have calls."""
    events: list[CallEvent] = field(default_factory=list)
    whole_logprobs: WholeLogprobs | None = None

    def add(self, chunk: Chunk) -> Chunk:
        """Add the next piece; return it as sent to the client."""
        if self.plan.is_prompt_only:
            chunk = _without_completion(chunk)
        if self.calls is not None:
            self.new_events = self.calls.read(chunk)
        self.note(chunk.tokens)
        self.last = chunk
        return chunk

    def note(self, tokens: Sequence[EmittedToken]) -> None:
        self.token_ids.extend(token.token_id for token in tokens)
        self.origins.extend(token.origin for token in tokens)

    def keep(self, chunk: Chunk) -> int:
        """Keep a piece, which `add` returned, for the whole response; return the bytes that it takes."""
        before = self._num_kept
        self.text += chunk.text.encode()
        self.events += self.new_events
        if self.logprobs is not None:
            if self.whole_logprobs is None:
                self.whole_logprobs = WholeLogprobs(self.logprobs)
            self.whole_logprobs.add(chunk.tokens)
        return self._num_kept - before

    @property
    def _num_kept(self) -> int:
        logprobs = self.whole_logprobs
        return len(self.text) + len(self.last.receipt) + (0 if logprobs is None else logprobs.num_bytes)

    @property
    def finish(self) -> str | None:
        """OpenAI's finish reason; None before the last chunk."""
        reason = self.last.finish_reason
        if self.calls is not None and self.calls.has_whole_calls and reason is FinishReason.STOP:
            return "tool_calls"
        return None if reason is None else reason.value

    def gammaray(self) -> types.GammarayResult:
        """Return the response object `gammaray`; the choice must be finished."""
        last = self.last
        assert last.summary is not None, "the last chunk carries the summary"
        own = {
            "session_id": last.session_id,
            "seed": last.seed,
            "origins": self.origins,
            "token_ids": self.token_ids.tolist(),
            **({"receipt": last.receipt} if last.receipt else {}),
            **speculation_object(last.summary),
        }
        return cast("types.GammarayResult", own)


def speculative_decoding(summary: SpeculationSummary) -> types.SpeculativeDecoding:
    """Return vLLM's object `metrics.speculative_decoding` of a finished choice.

    A step is a cycle with a proposal. Tokens of cycles that a former owner of the session did not report are
    not counted, as the lengths of their steps are unknown. `num_spec_tokens` is absent: proposals have no
    fixed length.
    """
    histogram = list(summary.accepted_lengths) or [0]
    histogram[0] -= summary.plain_cycles
    steps, accepted = sum(histogram), sum(length * count for length, count in enumerate(histogram))
    drafted = accepted + summary.drafted_tokens - summary.accepted_tokens
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": steps,
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


def reader_of(plan: ChoicePlan, tokenizer: Tokenizer) -> CallReader | None:
    """Return what finds the calls of a choice; None if it has none."""
    if plan.calls is None:
        return None
    return CallReader(plan.calls, tokenizer, plan.request.stop, plan.prompt_text)


class Response(ABC):
    """The response to one request: its choices, and their JSON format."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_logprobs_in_choice: ClassVar[bool]

    def __init__(self, model: str, plans: Sequence[ChoicePlan], tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.states = [
            ChoiceState(plan, self.new_logprobs(plan), calls=reader_of(plan, tokenizer)) for plan in plans
        ]
        self._num_logprobs = self._num_bytes = 0
        self._head = {"created": int(time.time()), "model": model}
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def new_logprobs(self, plan: ChoicePlan) -> LogprobFormat | None:
        """Return the format of a choice's log-probabilities, None if they were not requested."""

    @abstractmethod
    def opening(self, state: ChoiceState) -> dict[str, Any] | None:
        """Return the first body of a streamed choice, before its first token; None for no such event."""

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """Return the body of a streamed choice with a piece of text."""

    def deltas(self, state: ChoiceState, text: str) -> list[dict[str, Any]]:
        """Return the bodies of a streamed choice with what its last chunk, of this text, adds."""
        return [self.delta(text)] if text else []

    @abstractmethod
    def content(self, state: ChoiceState) -> dict[str, Any]:
        """Return the body of a whole choice."""

    def recall(self, tokens: Sequence[EmittedToken]) -> None:
        """Add tokens of a resumed stream's only choice that the client has already received."""
        (state,) = self.states
        state.is_opened = True
        state.note(tokens)
        if state.logprobs is not None:
            state.logprobs.render(tokens)
        if state.calls is not None:
            state.calls.recall(tokens)

    def add(self, index: int, chunk: Chunk) -> None:
        """Add a piece of choice `index` to a whole response; InvalidArgumentError if it gets too large."""
        chunk = self._add(index, chunk)
        self._num_bytes += self.states[index].keep(chunk)
        check_size(self.states[0].plan.request, len(self.states), self._num_bytes)

    def _add(self, index: int, chunk: Chunk) -> Chunk:
        state, prompt = self.states[index], chunk.prompt_logprobs
        if prompt is not None:
            for other in self.states:
                num_logprobs = other.plan.num_logprobs(len(prompt.token_ids))
                if num_logprobs and other.plan.prompt_index == state.plan.prompt_index:
                    self._num_logprobs += num_logprobs
                    check_num_logprobs(other.plan, self._num_logprobs)
                    other.prompt_logprobs = prompt
        return state.add(chunk)

    def pieces(self, index: int, chunk: Chunk, options: StreamOptions) -> list[dict[str, Any]]:
        """Add a piece of choice `index`; return its events, the choice's opening first; maybe none.

        InvalidArgumentError if the prompts so far have too many log-probabilities for one response.
        """
        state = self.states[index]
        events = self._piece_events(state, self._add(index, chunk), options)
        opening = None if state.is_opened else self.opening(state)
        if opening is not None:
            events = [self._event(state, opening), *events]
        state.is_opened = True
        if options.include_usage:  # the whole response's comes in an event of its own
            usage = _token_counts(chunk.prompt_tokens, chunk.offset + len(chunk.tokens))
            for event in events:
                event["usage"] = usage if options.continuous_usage_stats else None
        return events

    def _piece_events(self, state: ChoiceState, chunk: Chunk, options: StreamOptions) -> list[dict[str, Any]]:
        """Return a piece's events: the first has what belongs to its tokens, the last the finish reason."""
        has_prompt = chunk.prompt_logprobs is not None
        logprobs: Any = None
        if state.logprobs is not None and (has_prompt or chunk.tokens):
            logprobs = state.logprobs.render(chunk.tokens, chunk.prompt_logprobs)
        shows_tokens = state.plan.stream_tokens and bool(chunk.tokens)
        deltas = self.deltas(state, chunk.text)
        if not (deltas or logprobs or has_prompt or shows_tokens or chunk.finish_reason):
            return []
        *others, last = deltas or [self.delta("")]
        events = [self._event(state, delta) for delta in others]
        events.append(self._event(state, last, state.finish))
        first = events[0]
        first["choices"][0]["logprobs"] = logprobs
        if has_prompt:
            self._add_prompt_logprobs(state, first, first["choices"][0])
        if chunk.finish_reason is not None:
            events[-1]["gammaray"] = state.gammaray()
            if not options.include_usage:  # else only the last event has it: clients read it once
                events[-1] |= self._metrics()
        if shows_tokens:
            first["gammaray"] = {**first.get("gammaray", {}), "tokens": [_token(t) for t in chunk.tokens]}
        return events

    def usage_event(self) -> dict[str, Any]:
        """Return the last event of a stream with `include_usage`."""
        event = {"id": self._id, "object": self.chunk_object, **self._head, "choices": []}
        return {**event, **self._results()}

    @property
    def num_entries(self) -> int:
        """Number of values that are encoded for the whole response at its end."""
        prompts = [state.prompt_logprobs for state in self.states if state.prompt_logprobs is not None]
        count = sum(len(state.token_ids) for state in self.states)
        return count + sum(len(prompt.token_ids) + len(prompt.top_token_ids) for prompt in prompts)

    def whole(self) -> dict[str, Any]:
        """Return the whole response, with `EncodedList`s; each of several choices has its own `gammaray`."""
        choices = []
        for state in self.states:
            assert state.finish is not None, "whole() comes after the last chunk of every choice"
            logprobs = None
            if state.whole_logprobs is not None:
                logprobs = state.whole_logprobs.after(state.prompt_logprobs)
            choice = {"index": state.plan.index, **self.content(state), "logprobs": logprobs}
            choice["finish_reason"] = state.finish
            if len(self.states) > 1:
                choice["gammaray"] = state.gammaray()
            choices.append(choice)
        body = {"id": self._id, "object": self.whole_object, **self._head, "choices": choices}
        for state, choice in zip(self.states, choices, strict=True):
            self._add_prompt_logprobs(state, body, choice)
        return {**body, **self._results()}

    def _results(self) -> dict[str, Any]:
        return {"usage": self._usage(), "gammaray": self.states[0].gammaray(), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's `metrics`; as in vLLM, only a response with a single choice has it."""
        state = self.states[0]
        if len(self.states) > 1 or state.last.summary is None:
            return {}
        return {"metrics": {"speculative_decoding": speculative_decoding(state.last.summary)}}

    def _add_prompt_logprobs(self, state: ChoiceState, body: dict[str, Any], choice: dict[str, Any]) -> None:
        num_top, prompt = state.plan.prompt_logprobs, state.prompt_logprobs
        if num_top is not None and prompt is not None:
            holder = choice if self.prompt_logprobs_in_choice else body
            holder["prompt_logprobs"] = prompt_entries(prompt, num_top, self._tokenizer.token_bytes)

    def _event(self, state: ChoiceState, body: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": state.plan.index, **body, "logprobs": None, "finish_reason": finish}
        return {"id": self._id, "object": self.chunk_object, **self._head, "choices": [choice]}

    def _usage(self) -> types.Usage:
        ended = [(state.plan.prompt_index, state.last.usage) for state in self.states]
        usages = [(index, usage) for index, usage in ended if usage is not None]
        # The samples of one prompt share it, so it counts once.
        prompt_tokens = sum({index: usage.prompt_tokens for index, usage in usages}.values())
        cached_tokens = sum({index: usage.cached_tokens for index, usage in reversed(usages)}.values())
        completion_tokens = sum(usage.completion_tokens for _, usage in usages)
        return {
            **_token_counts(prompt_tokens, completion_tokens),
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for _, usage in usages),
                "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for _, usage in usages),
            },
        }


class CompletionResponse(Response):
    """The response of /v1/completions."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"
    prompt_logprobs_in_choice = True

    def new_logprobs(self, plan: ChoicePlan) -> LogprobFormat | None:
        if plan.request.num_top_logprobs is None:
            return None
        return CompletionLogprobs(plan, self._tokenizer)

    def opening(self, state: ChoiceState) -> dict[str, Any] | None:
        return {"text": state.plan.echo} if state.plan.echo else None

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def content(self, state: ChoiceState) -> dict[str, Any]:
        return {"text": state.plan.echo + state.text.decode()}


class ChatResponse(Response):
    """The response of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    prompt_logprobs_in_choice = False

    def new_logprobs(self, plan: ChoicePlan) -> LogprobFormat | None:
        return ChatLogprobs() if plan.request.num_top_logprobs is not None else None

    def opening(self, state: ChoiceState) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": "" if state.calls is None else None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def deltas(self, state: ChoiceState, text: str) -> list[dict[str, Any]]:
        if state.calls is None:
            return super().deltas(state, text)
        found = (_delta(event) for event in state.new_events)
        return [{"delta": delta} for delta in found if delta is not None]

    def content(self, state: ChoiceState) -> dict[str, Any]:
        if state.calls is None:
            return {"message": {"role": "assistant", "content": state.text.decode(), "refusal": None}}
        return {"message": _message(state.events)}


def _delta(event: CallEvent) -> types.Delta | None:
    match event:
        case PlainText(text):
            return {"content": text}
        case CallBegun(index, call_id, name):
            function: types.ArgumentsPiece = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ArgumentText(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case _:
            return None


def _message(events: Sequence[CallEvent]) -> types.AssistantMessage:
    content = ""
    calls: list[types.ToolCall] = []
    for event in joined(events):  # so that a call has its arguments in one piece
        match event:
            case PlainText(text):
                content += text
            case CallBegun(_, call_id, name):
                function: types.CalledFunction = {"name": name, "arguments": ""}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ArgumentText(index, text):
                calls[index]["function"]["arguments"] = text
    if not calls:
        return {"role": "assistant", "content": content, "refusal": None}
    return {"role": "assistant", "content": content or None, "refusal": None, "tool_calls": calls}


def _token(token: EmittedToken) -> types.PieceToken:
    return {
        "id": token.token_id,
        "origin": token.origin,
        "drafter": token.drafter,
        "bytes": list(token.token_bytes),
    }


def _token_counts(prompt_tokens: int, completion_tokens: int) -> types.TokenCounts:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _without_completion(chunk: Chunk) -> Chunk:
    """Return a piece of a choice without its completion, for a response with only the prompt."""
    chunk = replace(chunk, text="", tokens=(), offset=0)
    if chunk.finish_reason is None:
        return chunk
    usage = chunk.usage and Usage(chunk.usage.prompt_tokens, 0, 0, 0, chunk.usage.cached_tokens)
    return replace(chunk, finish_reason=FinishReason.LENGTH, usage=usage)
