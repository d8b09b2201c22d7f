"""Trains new versions of a head from the streams of one machine, one drafter after another.

A round begins with the stable version's weights, or goes on from the last round if that published nothing.
It takes some steps on all but the newest streams, and publishes the result if it expects more tokens per
proposal than the stable version on the newest ones, which it was not trained on.

A head learns the target's distributions, which follow from the hidden states that are stored for it. Before
the first step on a stream the consent that it rests on is noted; what rests on a withdrawn one is dropped.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
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

from gammaray.errors import GammarayError
from gammaray.learning.consents import Consents
from gammaray.learning.folder import DrafterFolder, LearningFolder, RecordName, Version, stored_streams
from services.engine.core.model import load_model
from services.heads.loading import load_head
from services.train.answers.store import TOP_K, Sequence
from services.train.evaluate import evaluate
from services.train.head import TrainableHead
from services.train.trainable import (
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
"""As `Trainable.rate` takes it, below that of `gammaray train`: the drafter is trained already."""

MIN_GAIN = 1.01
"""Least ratio of expected tokens per proposal, which publishes a version."""

MAX_TRAININGS = 4
"""Drafters whose training goes on from round to round; the one that was trained longest ago begins anew."""

_log = logging.getLogger(__name__)


@dataclass
class _Training:
    """A drafter between rounds, its parent version, and the consents of the tenants that both learnt from."""

    parent: int
    drafter: Trainable
    optimizer: torch.optim.Optimizer
    tenants: dict[str, int]
    num_steps: int = 0


class Trainer:
    """Trains the drafters of a folder, made by `gammaray train` for a target with fingerprints."""

    def __init__(
        self, folder: LearningFolder, target: str, drafter: str, stopped: Callable[[], bool]
    ) -> None:
        self._folder, self._target, self._base, self._stopped = folder, target, drafter, stopped
        # Of the layers only the shape is used, which the drafter has.
        self._module: Any = load_model(target, device="cpu", dtype="float32", num_layers=1).module
        self._identity = fingerprints_of(target)
        self._trainings: dict[str, _Training] = {}
        self._records: dict[Path, Record] = {}
        self._seen: dict[str, set[str]] = {}  # streams of a drafter's last round
        self._said: dict[str, str] = {}
        self._failed = ""  # drafter whose last round ended early
        self._new_training(DrafterFolder(folder.path), 0)  # fails now, not after the first streams
        for store in folder.stores():
            shutil.rmtree(store.path / "new", ignore_errors=True)  # of a process that ended

    def run_round(self) -> Version | None:
        """Train the drafter with the most new streams; return the version that was published, if any."""
        consents, notes, waiting = self._folder.read(), {}, []
        self._drop_withdrawn(consents)
        for store in self._folder.stores():
            name = store.path.name
            try:
                notes[name], new, files = self._wait_of(store, consents)
            except (GammarayError, OSError) as error:  # others go on
                notes[name], new = f"stopped: {error}", 0
            if new >= MIN_TOKENS:
                # One whose last round failed does not keep others waiting.
                waiting.append((name != self._failed, new, name, store, files))
        self._say(notes)
        if not waiting:
            return None
        *_, store, files = max(waiting)
        try:
            self._failed = store.path.name
            version = self._round(store, files, consents)
            self._failed = ""
        except FileNotFoundError as error:  # a stream was deleted meanwhile
            _log.info("%s: a round ends early: %s", store.path.name, error)
            self._drop_withdrawn(self._folder.read())
            return None
        return version

    def _drop_withdrawn(self, consents: Consents) -> None:
        self._trainings = {n: one for n, one in self._trainings.items() if consents.covers(one.tenants)}
        self._records = {path: record for path, record in self._records.items() if path.exists()}

    def _wait_of(self, store: DrafterFolder, consents: Consents) -> tuple[str, int, list[Path]]:
        """Return what a drafter waits for, how many new tokens it may be trained on, and its streams."""
        name, state, tenants = store.path.name, store.read(), consents.drafters().get(store.path.name, ())
        streams = sorted(
            (stream.name, stream.path)
            for stream in stored_streams(store.path / "records")
            if stream.name and stream.name.tenant in tenants and stream.path.suffix == ".npz"
        )
        files = [path for _, path in streams]
        if state.candidate is not None:
            return f"version {state.candidate} is compared with version {state.stable}", 0, files
        if state.is_pinned:
            return f"version {state.stable} is pinned", 0, files
        seen = self._seen.get(name, set())
        new = sum(record.num_answer for record, path in streams if path.name not in seen)
        if new >= MIN_TOKENS and len(files) <= MIN_HELD:
            return f"{len(files)} streams are too few", 0, files
        return f"{new} of {MIN_TOKENS} new tokens", new, files

    def _say(self, notes: dict[str, str]) -> None:
        """Note what is trained, or why nothing is, for `gammaray drafters list`."""
        if notes != self._said:
            with suppress(GammarayError):  # the disk is full
                self._folder.write_notes(notes)
                self._said = notes

    def _round(self, store: DrafterFolder, files: Items[Path], consents: Consents) -> Version | None:
        name, stable = store.path.name, store.read().stable
        training = self._trainings.pop(name, None)  # added again as the newest one
        if training is None or training.parent != stable:
            training = self._new_training(store, stable)
        held_count = min(MAX_HELD, max(MIN_HELD, round(HELD_SHARE * len(files))))
        self._read(files)
        held_out, taught = (
            [self._records[path] for path in part if path in self._records]
            for part in (files[-held_count:], files[:-held_count])
        )
        if len(held_out) < MIN_HELD or not taught:
            return None
        for path in files:
            tenant = RecordName.parse(path).tenant
            training.tenants.setdefault(tenant, consents.numbers.get(tenant, 0))
        self._trainings[name] = training
        while len(self._trainings) > MAX_TRAININGS:
            del self._trainings[next(iter(self._trainings))]
        before, began = _expected(self._drafter(store, stable), held_out), time.perf_counter()
        if not self._train(name, training, taught):
            return None
        after = _expected(training.drafter, held_out)
        took = time.perf_counter() - began
        _log.info("%s: %.0f s, expects %.3f tokens, version %d %.3f", name, took, after, stable, before)
        version = None
        if after >= MIN_GAIN * before:
            num_tokens = sum(record.num_answer for record in taught)
            version = self._publish(store, training, before, after, num_tokens)
        self._seen[name] = {path.name for path in files}
        return version

    def _train(self, name: str, training: _Training, taught: list[Record]) -> bool:
        """Take the steps of a round; return whether its consents still hold, and it was not stopped."""
        for number in range(STEPS):
            taught = [record for record in taught if record.path.exists()]
            self._drop_withdrawn(self._folder.read())
            if self._stopped() or not taught or name not in self._trainings:
                return False
            self._say({**self._said, name: f"step {number + 1} of {STEPS} from version {training.parent}"})
            training.num_steps += 1
            seed = training.parent * 1_000_003 + training.num_steps
            # Of a token alone, the share that is rejected would favour the likeliest one.
            train_on(training.drafter, training.optimizer, taught, STEP_TOKENS, seed, "coupled")
        return True

    def _new_training(self, store: DrafterFolder, number: int) -> _Training:
        drafter = self._drafter(store, number)
        tenants = dict(store.read().version(number).tenants) if number else {}
        return _Training(number, drafter, optimizer_of(drafter, drafter.rate(RATE)), tenants)

    def _drafter(self, store: DrafterFolder, number: int) -> Trainable:
        directory = str(store.directory(number)) if number else self._base
        # The ids of its output are taken with the weights.
        head = load_head(directory, self._target)[0].config
        drafter = TrainableHead(self._module, head.taps, torch.arange(head.num_outputs), _states)
        drafter.start_from(directory, self._target)
        return drafter

    def _publish(
        self, store: DrafterFolder, training: _Training, before: float, after: float, tokens: int
    ) -> Version | None:
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
                tenants=training.tenants,
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
        self._records = {path: record for path, record in self._records.items() if path in wanted}
        for path in files:
            if path in self._records:
                continue
            try:
                with np.load(path) as stored:
                    tokens, num_prompt = stored["token_ids"], int(stored["num_prompt"])
                    temperature = float(stored["temperature"])
                ids, logs = self._likeliest(_read_states(path)[num_prompt - 1 : -1, -1].float())
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
    """A stream; a head's states stay in its file `path`, as those of all streams would take 256 MiB."""

    path: Path = field(kw_only=True)


def _expected(drafter: Trainable, held_out: Items[Record]) -> float:
    """Return the tokens per proposal that coupled verification is expected to accept, at temperature 1."""
    return math.fsum(accumulate(evaluate(drafter, held_out)["coupled"], mul))


def _states(sequences: Items[Sequence]) -> list[Tensor]:
    return [_read_states(record.path) for record in sequences if isinstance(record, Record)]


def _read_states(path: Path) -> Tensor:
    """Return the target's states of a stream, bfloat16 [tokens, taps, hidden_size], 0 for the last token."""
    with np.load(path) as stored:
        states = torch.from_numpy(stored["states"]).view(torch.bfloat16)
    return torch.cat([states, torch.zeros_like(states[:1])])
