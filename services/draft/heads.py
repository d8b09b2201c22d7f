"""Drafts with a head on a draft worker, from the features that the target sends.

A step drafts a whole proposal for every waiting block, as a head is one layer. Nothing is drafted ahead:
tokens that are only guessed have no features. A session whose last feature is missing gets an empty proposal.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from gammaray.config import DraftSettings
from gammaray.errors import InvalidArgumentError
from gammaray.types import Proposal
from services.engine.core.model import load_config, max_context_of, torch_device, torch_dtype
from services.engine.loader import limit_cache
from services.engine.native.library import use_threads
from services.engine.native.runner import NativeRunner
from services.heads.features import read_features
from services.heads.loading import load_head
from services.heads.runner import HeadEngine, head_engine
from services.scheduling.grammars import Grammars
from services.scheduling.load import LoadCounters
from services.scheduling.planning import Limits, Running
from services.scheduling.scheduler import Scheduler
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import ProposeTask, Timing
from services.speculation.gain import GainMeter
from services.speculation.head_drafter import HeadDrafter
from services.speculation.predictions import DRAFT_TOP_K, WEIGHT_BITS

__all__ = ["HeadScheduler", "load_head_engine"]


class HeadScheduler(Scheduler[ProposeTask]):
    """Serves proposals of a head.

    Args:
        engine: The head and its cache.
        limits: Bounds of one forward; not used, as a head's are small.
        draft_top_k: Largest support of a shipped distribution.
        weight_bits: Its weights' sum is 2^weight_bits.
        grammars: Compiles the sessions' grammars; None: sessions with one are refused.
    """

    role: ClassVar[str] = "draft"

    def __init__(
        self,
        engine: HeadEngine,
        limits: Limits,
        *,
        draft_top_k: int = DRAFT_TOP_K,
        weight_bits: int = WEIGHT_BITS,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(engine, limits, grammars=grammars)
        self._drafter = HeadDrafter(engine, top_k=draft_top_k, bits=weight_bits)
        self._width = engine.feature_size
        self._gain = GainMeter()

    def load(self) -> LoadCounters:
        """Return the load counters so far, including tokens gained."""
        return replace(super().load(), gained=self._gain.gained)

    def _reply(self, task: ProposeTask, outcome: object, timing: Timing | None = None) -> None:
        super()._reply(task, None if task.is_notice else outcome, timing)

    def _forget(self, session: SessionCopy) -> None:
        self._gain.drop(session.session_id)
        self._drafter.drop(session.session_id)

    def _match_cache(self, session: SessionCopy) -> None:
        """Drop the features of tokens that are no longer those of the session."""
        self._drafter.truncate(session.session_id, session.changed_from)

    def _start(self, task: ProposeTask, session: SessionCopy) -> Running[ProposeTask]:
        if task.features is not None:
            rows = read_features(task.features, self._width)
            self._drafter.keep(task.session_id, task.features.start, rows)
        self._gain.asked(task.session_id, session.tokens, task.arrived)
        return Running(task, session, [], num_logits=1)

    def _prepare_blocks(self) -> None:
        """Draft for all blocks, and answer them."""
        blocks = list(self._running.values())
        self._running.clear()
        if not blocks:
            return
        began, now = time.perf_counter(), time.monotonic()
        proposals = self._drafter.draft(
            [(one.session, one.task.shape, len(one.session.tokens)) for one in blocks]
        )
        took = time.perf_counter() - began
        took_us, num_tokens = int(took * 1e6), sum(map(len, proposals))
        self.meter.step(took, len(blocks), num_tokens)
        for running, proposal in zip(blocks, proposals, strict=True):
            task, waited = running.task, max(0.0, now - running.task.arrived)
            self.meter.waited(waited)
            timing = running.timing
            timing.queue_us = int(waited * 1e6)
            forwards = max(1, proposal.depth)
            timing.add(Timing(0, took_us, took_us, len(blocks), num_tokens, forwards))
            self._gain.sent(task.session_id, proposal, task.base_position, task.arrived, time.monotonic())
            self._reply(task, proposal, timing)

    def _advance(self, running: Running[ProposeTask], logits: Tensor) -> Proposal | None:
        raise AssertionError("unreachable: no block is left for the scheduler's own forward")


def load_head_engine(name: str, target: str, settings: DraftSettings) -> HeadEngine:
    """Load the head of a draft worker.

    Args:
        name: Directory or hub name of the head.
        target: Its target, of which a missing embedding or output matrix is read.
        settings: The worker's settings.

    Raises:
        UnsupportedModelError: Its format, a flag, a size or a tensor is not supported.
        InvalidArgumentError: The target is not named, or a setting cannot be used.
    """
    if not target:
        raise InvalidArgumentError(
            "target_model", target, f"the target's directory or hub name, with head {name}"
        )
    torch.set_num_threads(settings.threads)
    where = torch_device(settings.device)
    head, target_ids = load_head(name, target)
    head.to(where, torch.float32 if where.type == "cpu" else torch_dtype(settings.dtype, where))
    engine = head_engine(
        head,
        target_ids,
        name=name,
        max_context=max_context_of(target, load_config(target).get_text_config()),
        weights=settings.draft_weights,
        uses_kernel=settings.engine != "transformers",
    )
    if isinstance(engine.runner, NativeRunner):
        use_threads(settings.threads)
    limit_cache(engine, settings)
    return engine
