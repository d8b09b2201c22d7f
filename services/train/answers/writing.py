"""Lets the target write answers: continuous batches on the engine, stored with the most likely tokens.

The rows of logits that draw an answer are the ones a drafter learns from, and the states of these forwards
those that a head reads, so the target reads no text twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gammaray.errors import FailedPreconditionError
from gammaray.qualify.training import TrainTask
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.train.answers.prompts import Job, Passages
from services.train.answers.states import StateStore
from services.train.answers.store import TOP_K, AnswerStore, Sequence

_MAX_TURN_TOKENS = 96
_MIN_TURN_TOKENS = 3
_MIN_ANSWER_TOKENS = 8
_PREFILL_TOKENS = 1024
"""Prompt tokens that may join one step; more of them would make all other answers wait."""


@dataclass
class _Running:
    job: Job
    token_ids: list[int]
    fed: int = 0
    num_prompt: int = 0
    turn_tokens: int = 0
    top_ids: list[Tensor] = field(default_factory=list)
    top_logs: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.job.number)

    @property
    def in_turn(self) -> bool:
        return self.num_prompt == 0


class Writer:
    """Generates the answers, with `states`, of jobs that are not stored yet; the texts become `passages`."""

    def __init__(
        self,
        engine: Engine,
        store: AnswerStore,
        jobs: Iterator[Job],
        task: TrainTask,
        eos_token_ids: tuple[int, ...],
        tokenizer: Any,
        passages: Passages,
        states: StateStore | None,
    ) -> None:
        engine.tap(states.taps if states else ())
        self._engine, self._store, self._jobs, self._task = engine, store, jobs, task
        self._eos, self._tokenizer, self._passages, self._states = eos_token_ids, tokenizer, passages, states
        self._random = torch.Generator().manual_seed(task.seed + len(store.jobs))
        self._running: list[_Running] = []
        self._waiting: Job | None = None

    def write(self, until: float, stopped: Callable[[], bool]) -> Iterator[int]:
        """Generate until the store has the task's answer tokens, `until` is reached, or no job is left.

        Yields the number of stored answer tokens after every step; `until` is a time of `time.monotonic`.
        """
        try:
            num_tokens = self._task.tokens
            while self._store.num_answer_tokens < num_tokens and time.monotonic() < until and not stopped():
                self._admit()
                if not self._running:
                    return
                self._step()
                yield self._store.num_answer_tokens
        finally:
            for running in self._running:
                self._engine.release(running.name)
            self._running.clear()

    def _admit(self) -> None:
        added, done = 0, self._store.jobs
        while len(self._running) < self._task.batch and added < _PREFILL_TOKENS:
            job = self._waiting or next((job for job in self._jobs if job.number not in done), None)
            self._waiting = None
            if job is None:
                return
            longest = len(job.prompt) + self._task.max_tokens
            if job.turn_end is not None:
                longest += _MAX_TURN_TOKENS + len(job.turn_end)
            if longest > self._engine.max_context:
                raise FailedPreconditionError(
                    f"prompt {job.number} has {len(job.prompt)} tokens; with an answer of "
                    f"{self._task.max_tokens} it exceeds the target's context of {self._engine.max_context}"
                )
            if not self._engine.has_room(str(job.number), longest) and self._running:
                self._waiting = job
                return
            num_prompt = 0 if job.turn_end is not None else len(job.prompt)
            self._running.append(_Running(job, list(job.prompt), num_prompt=num_prompt))
            added += len(job.prompt)

    def _step(self) -> None:
        feeds = [SequenceInput(r.name, r.fed, r.token_ids[r.fed :], 1) for r in self._running]
        rows = torch.cat(self._engine.step(feeds))
        total = rows.logsumexp(-1)
        top = rows.topk(min(TOP_K, rows.shape[-1]), -1)
        drawn = top.indices[:, 0].clone()
        heat = torch.tensor([1.0 if r.in_turn else r.job.temperature for r in self._running])
        hot = heat.nonzero()[:, 0]
        if len(hot):
            cumulative = (rows[hot] / heat[hot, None].to(rows.device)).softmax(-1).cumsum(-1)
            uniform = torch.rand(len(hot), 1, generator=self._random).to(rows.device)
            places = torch.searchsorted(cumulative, uniform * cumulative[:, -1:])[:, 0]
            drawn[hot] = places.clamp_max(rows.size(1) - 1)
        ids, logs = top.indices.int().cpu(), (top.values - total[:, None]).half().cpu()
        for text, states in zip(self._running, self._engine.taps, strict=False):  # none without a head
            text.states.append(states)
        running, self._running = self._running, []
        for row, (text, token) in enumerate(zip(running, drawn.tolist(), strict=True)):
            text.fed = len(text.token_ids)
            if text.in_turn:
                ended = self._turn(text, token)
            else:
                ended = self._answer(text, token, ids[row], logs[row])
            if ended:
                self._engine.release(text.name)
            else:
                self._running.append(text)

    def _turn(self, text: _Running, token: int) -> bool:
        """Continue the user's turn; return whether the job ends without an answer."""
        end = text.job.turn_end
        assert end is not None
        text.turn_tokens += 1
        if token in self._eos or token == end[0]:
            if text.turn_tokens <= _MIN_TURN_TOKENS and not text.job.prompt:
                return True
        else:
            text.token_ids.append(token)
            if text.turn_tokens < _MAX_TURN_TOKENS:
                return False
        text.token_ids += end
        text.num_prompt = len(text.token_ids)
        return False

    def _answer(self, text: _Running, token: int, ids: Tensor, logs: Tensor) -> bool:
        """Add a token; return whether the answer is complete, after storing it."""
        text.token_ids.append(token)
        text.top_ids.append(ids)
        text.top_logs.append(logs)
        length, job = len(text.top_ids), text.job
        if token not in self._eos and length < self._task.max_tokens:
            return False
        if length >= _MIN_ANSWER_TOKENS:
            token_ids = np.array(text.token_ids, dtype=np.int32)
            top_ids, top_logs = (torch.stack(rows).numpy() for rows in (text.top_ids, text.top_logs))
            answer = Sequence(token_ids, text.num_prompt, job.temperature, top_ids, top_logs, job.number)
            if self._states:  # first, as an answer without states has them computed again
                # The last token was not fed. No prediction is made from its state.
                self._states.add(job.number, F.pad(torch.cat(text.states), (0, 0, 0, 0, 0, 1)))
            self._store.append(answer)
            self._passages.add(self._tokenizer.decode(text.token_ids[text.num_prompt : -1]))
        return True
