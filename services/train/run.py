"""One run of `gammaray train`: generation, then training, each from where the last run ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from gammaray.demo_pair import resolve_model
from gammaray.errors import FailedPreconditionError, InvalidArgumentError
from gammaray.program.files import replacing, try_lock
from gammaray.program.prompts import read_prompts
from gammaray.qualify.training import TrainTask
from services.engine.core.device import has_bfloat16
from services.engine.core.model import eos_token_ids, load_config, load_model
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.train.answers.prompts import Passages, Turns, file_jobs, own_jobs
from services.train.answers.states import StateStore
from services.train.answers.store import AnswerStore, Sequence, check_meta, disk, write_json
from services.train.answers.writing import Writer
from services.train.draft_model import TrainableDraft, choose_vocabulary
from services.train.evaluate import evaluate
from services.train.head import TrainableHead
from services.train.trainable import DEPTH, UNROLL, Trainable, fingerprints_of, optimizer_of, train_on

_HELD_EVERY, _HELD_MOST = 16, 48
_MAX_LENGTH = 640
_WARM_UP_STEPS = 40
_CACHE_BYTES = 4 << 30
_REPORT_S = 15.0
UNROLL_FROM = 0.5
"""Share of its training after which a new head is trained in several steps; one learns faster at first."""

_RATE, _HEAD_RATE = 2e-3, 1e-3
"""Peaks of the learning rate, as `Trainable.rate` takes them; a head begins near what it should be."""

_TEMPERATURES = (0.0, 1.0)
"""Of the answers, in turn."""

_PATIENCE = 6
"""Measurements without improvement after which training stops."""

_SHAPE = ("kind", "layers", "draft_vocab", "seed")
"""Options that a saved state depends on."""


def run(task: TrainTask, report: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
    """Generate and train until the task is done, or `stopped`; return whether it is done.

    Raises:
        InvalidArgumentError: There is no such target, or an option does not fit it.
        FailedPreconditionError: The work folder is of another target or shape, or in use; the target has no
            chat template, or no fingerprint.
        ResourceExhaustedError: The disk is full; what was saved is intact.
    """
    path = resolve_model(task.target, "target")
    work = Path(task.work or f"{task.out.rstrip('/')}.work")
    with disk(work):
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    with lock:
        if not try_lock(lock):
            raise FailedPreconditionError(f"another process trains in {work}")
        return _Run(task, path, work, report, stopped).run()


@dataclass
class _Progress:
    """When it began, steps so far, the best score, measurements since that one, losses since the last one."""

    began_s: float
    step: int = 0
    best: float = float("-inf")
    worse: int = 0
    losses: list[float] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        task: TrainTask,
        path: str,
        work: Path,
        report: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.task, self.path, self.work, self.report, self.stopped = task, path, work, report, stopped
        self.identity = fingerprints_of(path)
        config = load_config(path).get_text_config()
        self.vocab_size, count = int(config.vocab_size), config.num_hidden_layers
        self.is_head = task.kind == "eagle3"
        self.layers = _layers(task, count)
        with disk(work):
            check_meta(work / "meta.json", self.identity)
        self.store = AnswerStore(work / "answers")
        self.clock = work / "elapsed.json"
        try:
            before = float(json.loads(self.clock.read_text())) if self.clock.exists() else 0.0
        except ValueError:
            before = 0.0
        self.began = time.monotonic() - before

    @cached_property
    def states(self) -> StateStore:
        return StateStore(self.work / "states", self._engine, self.layers)

    def _engine(self) -> Engine:
        task = self.task
        # GPUs' default, too. With 64 rows a CPU takes half of the time that it takes in float32.
        dtype = "bfloat16" if task.device == "cpu" and has_bfloat16("cpu") else "auto"
        engine = load_engine(
            self.path, device=task.device, dtype=dtype, threads=task.threads, cache_budget_bytes=_CACHE_BYTES
        )
        torch.set_num_threads(task.threads)  # the compiled kernel leaves torch one
        return engine

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def run(self) -> bool:
        try:
            self._generate()
            return not self.stopped() and self._train()
        finally:
            with disk(self.work):
                write_json(self.clock, self.elapsed())

    def _generate(self) -> None:
        task, limit = self.task, self.task.minutes * 30  # half of the time, in seconds
        if self.store.num_answer_tokens >= task.tokens or self.elapsed() >= limit:
            return
        tokenizer: Any = AutoTokenizer.from_pretrained(self.path)
        passages = Passages()
        texts = read_prompts(Path(task.prompts), "--prompts") if task.prompts else None
        if texts is None:
            jobs = own_jobs(Turns(tokenizer), passages, _TEMPERATURES, task.seed)
        elif task.chat:
            jobs = file_jobs(list(map(Turns(tokenizer).prompt, texts)), _TEMPERATURES)
        else:
            jobs = file_jobs([tokenizer(text)["input_ids"] for text in texts], _TEMPERATURES)
        engine = self._engine()
        eos, states = eos_token_ids(self.path), self.states if self.is_head else None
        writer = Writer(engine, self.store, jobs, task, eos, tokenizer, passages, states)
        last = time.monotonic()
        for count in writer.write(self.began + limit, self.stopped):
            if time.monotonic() - last > _REPORT_S:
                last = time.monotonic()
                self.report(f"{self.elapsed():.0f} s: {count} of {task.tokens} answer tokens generated")
                with disk(self.work):
                    write_json(self.clock, self.elapsed())

    def _train(self) -> bool:
        task = self.task
        torch.set_num_threads(task.threads)
        sequences = [
            _clipped(s)
            for s in self.store.sequences()
            if s.num_prompt + 8 <= min(_MAX_LENGTH, len(s.token_ids))
        ]
        held_out = sequences[::_HELD_EVERY][:_HELD_MOST]
        taught = [s for i, s in enumerate(sequences) if i % _HELD_EVERY or i >= _HELD_EVERY * _HELD_MOST]
        if not taught:
            few = f"{len(sequences)} answers are too few"
            raise FailedPreconditionError(f"{few}: allow more minutes or tokens")
        drafter = self._drafter(taught)
        peak = task.learning_rate or drafter.rate(_HEAD_RATE if self.is_head else _RATE)
        optimizer = optimizer_of(drafter, peak)
        progress = self._restore(drafter, optimizer)
        budget, is_first = task.minutes * 60, True
        while True:
            if self.stopped():
                self._save(drafter, optimizer, progress)
                return False
            is_over = self.elapsed() >= budget
            if (progress.step % task.steps_per_report == 0 and not (is_first and progress.step)) or is_over:
                self._measure(drafter, held_out, progress, is_first)
                self._save(drafter, optimizer, progress)
                progress.losses.clear()
                if is_over:
                    return True
                if progress.worse >= _PATIENCE:
                    self.report(f"no improvement in {progress.worse} measurements: stopped early")
                    return True
            is_first = False
            share = (self.elapsed() - progress.began_s) / max(budget - progress.began_s, 1.0)
            rate = min(1.0, (progress.step + 1) / _WARM_UP_STEPS) * min(1.0, max(0.05, 2 * (1 - share)))
            optimizer.param_groups[0]["lr"] = peak * rate
            if self.is_head:
                is_late = share >= UNROLL_FROM or task.init != ""
                drafter.num_depths = UNROLL if is_late else 1
            seed = task.seed * 1_000_003 + progress.step
            loss = train_on(drafter, optimizer, taught, task.train_tokens, seed, task.loss)
            progress.losses.append(loss)
            progress.step += 1

    def _drafter(self, taught: list[Sequence]) -> Trainable:
        task = self.task
        rows = choose_vocabulary(taught, min(task.draft_vocab, self.vocab_size), self.vocab_size)
        state = self.work / "state.pt"
        if state.exists():
            rows = torch.load(state, weights_only=True)["drafter"]["target_ids"]
        torch.manual_seed(task.seed)
        module = load_model(self.path, device="cpu", dtype="float32").module
        self.num_weights = sum(parameter.numel() for parameter in module.parameters())
        drafter: Trainable
        if self.is_head:
            drafter = TrainableHead(module, self.layers, rows, self.states.of)
        else:
            drafter = TrainableDraft(module, self.layers, rows)
        if task.init and not state.exists():
            drafter.start_from(task.init, self.path)
        return drafter.to(task.device)

    def _measure(
        self, drafter: Trainable, held_out: list[Sequence], progress: _Progress, is_first: bool
    ) -> None:
        card = evaluate(drafter, held_out)
        cost = drafter.num_weights / self.num_weights
        card["predicted_speedup"] = round(card["tokens_per_cycle"] / (1 + DEPTH * cost), 3)
        card |= {"steps": progress.step, "seconds": round(self.elapsed())}
        card["answer_tokens"] = self.store.num_answer_tokens
        loss = sum(progress.losses) / max(1, len(progress.losses))
        shown = " ".join(f"{key} {value}" for key, value in card.items() if key not in ("gamma", "seconds"))
        self.report(f"{self.elapsed():.0f} s: " + ("" if is_first else f"loss {loss:.3f} ") + shown)
        score = card["tokens_per_cycle"] + sum(card["coupled"])
        if score <= progress.best:
            progress.worse += 1
            return
        progress.best, progress.worse = score, 0
        size = drafter.save(Path(self.task.out), self.identity, Path(self.path).name, card)
        self.report(f"saved {self.task.out}, {size / 1e6:.1f} MB")

    @property
    def _shape(self) -> dict[str, Any]:
        return {key: getattr(self.task, key) for key in _SHAPE} | {"layers": self.layers}

    def _save(self, drafter: Trainable, optimizer: torch.optim.Optimizer, progress: _Progress) -> None:
        state = {"shape": self._shape, "step": progress.step, "best": progress.best, "worse": progress.worse}
        state["began_s"] = progress.began_s
        state |= {"drafter": drafter.state_dict(), "optimizer": optimizer.state_dict()}
        with disk(self.work):
            try:
                with replacing(self.work / "state.pt") as path:
                    torch.save(state, path)
            except RuntimeError as error:  # torch's own error where a write fails
                raise OSError(str(error).splitlines()[0]) from error
            write_json(self.clock, self.elapsed())

    def _restore(self, drafter: Trainable, optimizer: torch.optim.Optimizer) -> _Progress:
        path = self.work / "state.pt"
        if not path.exists():
            return _Progress(self.elapsed())
        state = torch.load(path, weights_only=True, map_location=self.task.device)
        if state["shape"] != self._shape:
            mismatch = f"{path} has shape {state['shape']}, not {self._shape}"
            raise FailedPreconditionError(f"{mismatch}: use another --work, or delete it")
        drafter.load_state_dict(state["drafter"])
        optimizer.load_state_dict(state["optimizer"])
        self.report(f"continues at step {state['step']}, after {self.elapsed():.0f} s")
        return _Progress(state.get("began_s", 0.0), state["step"], state["best"], state["worse"])


def _layers(task: TrainTask, count: int) -> tuple[int, ...]:
    """Return the layers to start from, or whose entering states a head reads, of a target with `count`."""
    is_head = task.kind == "eagle3"
    default = (2, count // 2, count - 3, count) if is_head else (0, 1)
    most = count if is_head else count - 1
    if task.layers:
        layers = tuple(map(int, task.layers.split(",")))
    else:
        layers = tuple(dict.fromkeys(layer for layer in default if 0 <= layer <= most))
    if not set(layers) <= set(range(most + 1)):
        raise InvalidArgumentError("layers", layers, f"numbers from 0 to {most}")
    if is_head and layers[-1] != count:
        raise InvalidArgumentError("layers", layers, f"{count} as the last one: the last state")
    return layers


def _clipped(sequence: Sequence) -> Sequence:
    count = min(_MAX_LENGTH, len(sequence.token_ids))
    answer = count - sequence.num_prompt
    ids, logs = sequence.top_ids[:answer], sequence.top_logs[:answer]
    return replace(sequence, token_ids=sequence.token_ids[:count], top_ids=ids, top_logs=logs)
