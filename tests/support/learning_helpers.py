"""Schedulers whose head learns, with a tiny target."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.learning.folder import DrafterFolder, RecordName, Version
from gammaray.types import SamplingParams, VerificationMethod
from services.demo_pair import TARGET_DIR
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from services.own.head_loading import load_learning_drafter
from services.own.target_scheduler import TargetScheduler
from services.process.fingerprints import model_identity, vocab_sha256
from services.scheduling.planning import Limits
from services.scheduling.sessions import SessionCopy
from services.scheduling.tasks import Release, SessionSpec
from services.train.draft_model import TrainableDraft
from services.train.head import TrainableHead
from tests.support.engine_helpers import random_tokens
from tests.support.head_helpers import bigram_head, bigram_target
from tests.support.target_helpers import Run

TAPS = (0, 1, 3)
PROMPTS = [random_tokens(12, seed=seed, vocab_size=97) for seed in range(4)]


def tiny_target(folder: Path) -> Path:
    """Write a bigram target with a tokenizer, which only its fingerprint is read of."""
    bigram_target(folder, max_positions=512)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, folder)
    return folder


def _described(target: Path) -> dict[str, str]:
    identity = model_identity(str(target), dtype="-", device="cpu", deterministic=False)
    return {"target": identity.partition("/")[0], "tokenizer": vocab_sha256(str(target))}


def right_head(folder: Path, target: Path, num_outputs: int = 97) -> Path:
    """Write a head of so many tokens, as of `gammaray train`, that predicts a bigram target exactly."""
    bigram_head(folder, target)
    if num_outputs < 97:
        stored = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**stored, "draft_vocab_size": num_outputs}))
        weights = load_file(folder / "model.safetensors")
        output = load_file(target / "model.safetensors")["lm_head.weight"]
        weights["lm_head.weight"] = output[:num_outputs].clone()
        weights["d2t"] = torch.zeros(num_outputs, dtype=torch.int64)
        save_file(weights, folder / "model.safetensors")
    found = _described(target)
    parts = {name: {"name": "bigram", "fingerprint": digest} for name, digest in found.items()}
    (folder / "gammaray.json").write_text(json.dumps({"format": 1, **parts}))
    return folder


def useless(folder: Path, drafter: Path, target: Path) -> Path:
    """Write a drafter that prefers the tokens that are the least likely ones."""
    shutil.copytree(drafter, folder)
    weights = load_file(folder / "model.safetensors")
    output = load_file(target / "model.safetensors")["lm_head.weight"] * -10
    weights["lm_head.weight"] = output[: len(weights.get("d2t", output))].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def new_head(folder: Path, target: Path, num_outputs: int = 97) -> Path:
    """Write a head before its first step of training, which knows so many tokens."""
    module = load_model(str(target), device="cpu", dtype="float32").module
    torch.manual_seed(5)
    head = TrainableHead(module, TAPS, torch.arange(num_outputs), lambda sequences: [])
    head.save(folder, _described(target), "bigram", {})
    return folder


def draft_model(folder: Path, target: Path) -> Path:
    """Write a draft model that predicts a bigram target exactly."""
    module = load_model(str(target), device="cpu", dtype="float32").module
    TrainableDraft(module, (0, 1), torch.arange(97)).save(folder, _described(target), "bigram", {})
    return folder


def version(number: int, parent: int = 0, tenants: Sequence[str] = ("",)) -> Version:
    given = {"created_at": datetime(2026, 1, 1, tzinfo=timezone.utc), "tenants": dict.fromkeys(tenants, 0)}
    return Version(number=number, parent=parent, **given, tokens=100, expected=1.0, parent_expected=0.9)


def publish(store: DrafterFolder, weights: Path | None = None, **fields: object) -> Version | None:
    """Publish a copy of a directory as the next version; without one an empty directory."""
    written = store.path / "new"
    shutil.rmtree(written, ignore_errors=True)
    if weights is None:
        written.mkdir(parents=True)
    else:
        store.path.mkdir(parents=True, exist_ok=True)
        shutil.copytree(weights, written)
    return store.publish(written, lambda number: version(number, **fields))  # type: ignore[arg-type]


@contextmanager
def learning(
    folder: Path, target: Path, drafter: Path, monkeypatch, command: list[str] | None = None
) -> Iterator[TargetScheduler]:
    """A scheduler whose head learns in a folder; a command trains, or nothing."""
    monkeypatch.setattr("services.learning.versions.trainer_command", lambda *_: command)
    engine = load_engine(str(target))
    settings = TargetSettings(model=str(target), head=str(drafter), learn=str(folder))
    learner = load_learning_drafter(settings, engine)
    scheduler = TargetScheduler(engine, Limits(1024, 256), head=learner, draft_ahead=False)
    try:
        yield scheduler
    finally:
        scheduler.close()


def begin(scheduler: Any, seed: int, tenant: str = "") -> Run:
    """Return a session at temperature 1, not yet at work."""
    name = f"{tenant}:session-{seed}" if tenant else f"session-{seed}"
    return Run(scheduler, PROMPTS[seed % 4], SamplingParams(temperature=1.0, seed=seed), name=name)


def run_for(run: Run, count: int, gamma: int = 3) -> list[int]:
    """Go on until a session has so many tokens of output; return these."""
    while len(run.output) < count:
        run.cycle(Shape(gamma))
    return run.output[:count]


def end(run: Run, *, forgets: bool = False) -> None:
    run.scheduler.release([Release(run.name, forgets=forgets)])


def serve_until(scheduler: Any, condition: Callable[[], bool]) -> None:
    """Serve short sessions until a condition holds, at most a minute."""
    ends = time.monotonic() + 60
    for seed in range(1000, 11_000):
        if condition() or time.monotonic() > ends:
            break
        run = begin(scheduler, seed)
        run_for(run, 24)
        end(run)
    assert condition()


def ended(name: str, tokens: Sequence[int], num_prompt: int = 8) -> SessionCopy:
    """Return a worker's copy of a session that ends."""
    params = SamplingParams(temperature=0.5, seed=1)
    spec = SessionSpec(params, VerificationMethod.COUPLED, num_prompt, ())
    return SessionCopy(name, 1, spec, tokens=list(tokens))


def records(folder: Path, name: str = "open") -> list[Path]:
    """Return the streams that a drafter may learn from, the oldest first."""
    return sorted((folder / name / "records").glob("*.npz"), key=RecordName.parse)
