"""Trains new versions of a head or draft model from the streams of one machine, one drafter after another.

A round begins with the stable version's weights, or goes on from the last round if that published nothing.
It takes some steps on all but the newest streams, and publishes the result if it expects more tokens per
proposal than the stable version on the newest ones, which it was not trained on.

A head learns the target's distributions, which follow from the hidden states that are stored for it. Streams
of draft workers have tokens only: a draft model learns these, as the target has chosen each of them.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from gammaray.learning.folder import DrafterStore, LearningFolder, RecordName, Version
from services.engine.core.model import load_config, load_model
from services.heads.loading import load_head, names_head
from services.train.answers.store import TOP_K, Sequence
from services.train.draft_model import TrainableDraft
from services.train.evaluate import evaluate
from services.train.head import TrainableHead
from services.train.trainable import (
    DEPTH,
    Trainable,
    fingerprints_of,
    mixed_precision,
    optimizer_of,
    train_on,
)

MIN_TOKENS = 2000
"""New tokens of completions before a round."""

HELD_SHARE, MIN_HELD, MAX_HELD = 0.15, 4, 24
"""Of the newest streams, which are not trained on."""

STEPS, STEP_TOKENS = 20, 512
"""Steps of a round, and least tokens of each."""

RATE = 3e-4
"""Learning rate, below that of `gammaray train`: the drafter is trained already."""

MIN_GAIN = 1.01
"""Least ratio of expected tokens per proposal, which publishes a version."""

_log = logging.getLogger(__name__)


@dataclass
class _Training:
    """A drafter between rounds.

    Attributes:
        parent: The version that it began with.
        tenants: Whose streams it was trained on, with those of its parent.
    """

    parent: int
    drafter: Trainable
    optimizer: torch.optim.Optimizer
    tenants: set[str]
    num_steps: int = 0


class Trainer:
    """Trains the drafters of a folder, made by `gammaray train` for a target with fingerprints."""

    def __init__(
        self, folder: LearningFolder, target: str, drafter: str, stopped: Callable[[], bool]
    ) -> None:
        self._folder, self._target, self._base, self._stopped = folder, target, drafter, stopped
        self._is_head = names_head(drafter)
        self._num_layers = 1 if self._is_head else int(load_config(drafter).num_hidden_layers)
        # Of the layers only the shape is used, which the drafter has.
        num_layers = self._num_layers
        self._module: Any = load_model(target, device="cpu", dtype="float32", num_layers=num_layers).module
        self._identity = fingerprints_of(target)
        self._trainings: dict[str, _Training] = {}
        self._records: dict[Path, Record] = {}
        self._seen: dict[str, int] = {}  # when the newest stream of a drafter's last round was written
        self._new_training(DrafterStore(folder.path), 0)  # fails now, not after the first streams

    def run_round(self) -> Version | None:
        """Train the drafter with the most new streams; return the version that was published, if any."""
        waiting = {}
        for store in self._folder.stores():
            found = store.read()
            if found.candidate is None and not found.is_pinned:
                files = sorted((store.path / "records").glob("*.npz"), key=RecordName.parse)
                seen = self._seen.get(store.path.name, 0)
                new = sum(
                    name.num_answer for path in files if (name := RecordName.parse(path)).written_at > seen
                )
                waiting[store.path.name] = new, store, files
        if not waiting:
            return None
        new, store, files = max(waiting.values(), key=lambda entry: entry[0])
        try:
            return self._round(store, files) if new >= MIN_TOKENS else None
        except FileNotFoundError as error:  # a stream was deleted meanwhile
            _log.info("%s: a round ends early: %s", store.path.name, error)
            return None

    def _round(self, store: DrafterStore, files: Items[Path]) -> Version | None:
        stable = store.read().stable
        training = self._trainings.get(store.path.name)
        if training is None or training.parent != stable:
            training = self._trainings[store.path.name] = self._new_training(store, stable)
        held_count = min(MAX_HELD, max(MIN_HELD, round(HELD_SHARE * len(files))))
        self._read(files)
        held, taught = (
            [self._records[path] for path in part if path in self._records]
            for part in (files[-held_count:], files[:-held_count])
        )
        if len(held) < MIN_HELD or not taught:
            return None
        before = _expected(self._drafter(store, stable), held)
        began = time.perf_counter()
        for _ in range(STEPS):
            if self._stopped():
                return None
            training.num_steps += 1
            seed = training.parent * 1_000_003 + training.num_steps
            # Of a token alone, the share that is rejected would favour the likeliest one.
            kind = "coupled" if self._is_head else "kl"
            train_on(training.drafter, training.optimizer, taught, STEP_TOKENS, seed, kind)
        after = _expected(training.drafter, held)
        training.tenants |= {RecordName.parse(path).tenant for path in files}
        took = time.perf_counter() - began
        _log.info(
            "%s: %.0f s, expects %.3f tokens, version %d %.3f", store.path.name, took, after, stable, before
        )
        version = None
        if after >= MIN_GAIN * before:
            version = self._publish(store, training, before, after, sum(one.num_answer for one in taught))
        self._seen[store.path.name] = RecordName.parse(files[-1]).written_at
        return version

    def _new_training(self, store: DrafterStore, number: int) -> _Training:
        drafter = self._drafter(store, number)
        tenants = set(store.read().version(number).tenants) if number else set()
        return _Training(number, drafter, optimizer_of(drafter, RATE), tenants)

    def _drafter(self, store: DrafterStore, number: int) -> Trainable:
        directory = str(store.directory(number)) if number else self._base
        drafter: Trainable
        # The ids of its output are taken with the weights.
        if self._is_head:
            head = load_head(directory, self._target)[0].config
            ids = torch.arange(head.num_outputs)
            drafter = TrainableHead(self._module, head.taps, ids, _states)
        else:
            config: Any = load_config(directory)
            ids = torch.arange(getattr(config, "draft_vocab_size", config.vocab_size))
            drafter = TrainableDraft(self._module, range(self._num_layers), ids)
        drafter.start_from(directory, self._target)
        return drafter

    def _publish(
        self, store: DrafterStore, training: _Training, before: float, after: float, tokens: int
    ) -> Version | None:
        if not training.tenants <= {"", *self._folder.consents()}:  # one withdrew meanwhile
            del self._trainings[store.path.name]
            return None
        written = store.path / "new"
        shutil.rmtree(written, ignore_errors=True)
        card = {"expected": round(after, 3), "parent": training.parent, "parent_expected": round(before, 3)}
        training.drafter.save(written, self._identity, Path(self._target).name, card)
        version = store.publish(
            written,
            lambda number: Version(
                number=number,
                parent=training.parent,
                created_at=datetime.now(timezone.utc).replace(microsecond=0),
                tenants=tuple(sorted(training.tenants)),
                tokens=tokens,
                expected=round(after, 4),
                parent_expected=round(before, 4),
            ),
        )
        # The next round begins with the version that serves by then.
        del self._trainings[store.path.name]
        return version

    def _read(self, files: Items[Path]) -> None:
        wanted = set(files)
        self._records = {path: one for path, one in self._records.items() if path in wanted}
        for path in files:
            if path in self._records:
                continue
            try:
                with np.load(path) as stored:
                    tokens, num_prompt = stored["token_ids"], int(stored["num_prompt"])
                    temperature = float(stored["temperature"])
                if self._is_head:
                    ids, logs = self._likeliest(_read_states(path)[num_prompt - 1 : -1, -1].float())
                else:
                    ids, logs = tokens[num_prompt:, None], np.zeros((len(tokens) - num_prompt, 1), np.float32)
            except (OSError, EOFError, ValueError, KeyError, BadZipFile):  # deleted, or cut by a lost machine
                continue
            self._records[path] = Record(tokens, num_prompt, temperature, ids, logs, path=path)

    @torch.no_grad()
    def _likeliest(self, last: Tensor) -> tuple[Any, Any]:
        """Return the target's most likely tokens after its last states, and their log-probabilities."""
        with mixed_precision(last.device):
            logits = self._module.get_output_embeddings()(self._module.get_decoder().norm(last))
        top = logits.float().log_softmax(-1).topk(min(TOP_K, logits.shape[-1]))
        return top.indices.numpy(), top.values.numpy()


@dataclass(frozen=True)
class Record(Sequence):
    """A stream, of which a head's states stay in its file: those of all streams would take 256 MiB.

    Attributes:
        path: Its file.
    """

    path: Path = field(kw_only=True)


def _expected(drafter: Trainable, held: Items[Record]) -> float:
    """Return the tokens per proposal that coupled verification is expected to accept, at temperature 1.

    Of a draft model it is a lower bound: a token counts with the probability that the drafter gives it.
    """
    rates = evaluate(drafter, held)["coupled"]
    # After accepted tokens a draft model has read the true text: all depths have the rate of the first.
    return math.fsum(accumulate(rates * (DEPTH // len(rates)), mul))


def _states(sequences: Items[Sequence]) -> list[Tensor]:
    return [_read_states(one.path) for one in sequences if isinstance(one, Record)]


def _read_states(path: Path) -> Tensor:
    """Return the target's states of a stream, bfloat16 [tokens, taps, hidden_size], 0 for the last token."""
    with np.load(path) as stored:
        states = torch.from_numpy(stored["states"]).view(torch.bfloat16)
    return torch.cat([states, torch.zeros_like(states[:1])])
