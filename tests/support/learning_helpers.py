"""A target worker's scheduler whose head learns, with a tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gammaray.blocks import Shape
from gammaray.config import TargetSettings
from gammaray.learning.folder import DrafterStore, Version
from gammaray.types import SamplingParams
from services.demo_pair import TARGET_DIR
from services.engine.core.model import load_model
from services.engine.loader import load_engine
from services.learning.drafter import LearningDrafter
from services.process.fingerprints import model_identity, vocab_sha256
from services.scheduling.planning import Limits
from services.scheduling.tasks import Release
from services.target_worker.loading import load_learning_drafter
from services.target_worker.scheduler import TargetScheduler
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


def right_head(folder: Path, target: Path) -> Path:
    """Write a head that predicts a bigram target exactly, as if `gammaray train` had made it."""
    bigram_head(folder, target)
    found = _described(target)
    parts = {name: {"name": "bigram", "fingerprint": digest} for name, digest in found.items()}
    (folder / "gammaray.json").write_text(json.dumps({"format": 1, **parts}))
    return folder


def useless_head(folder: Path, head: Path, target: Path) -> Path:
    """Write a head that prefers the tokens that are the least likely ones."""
    shutil.copytree(head, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = load_file(target / "model.safetensors")["lm_head.weight"] * -10
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def new_head(folder: Path, target: Path) -> Path:
    """Write a head before its first step of training."""
    module = load_model(str(target), device="cpu", dtype="float32").module
    torch.manual_seed(5)
    head = TrainableHead(module, TAPS, torch.arange(97), 5, lambda sequences: [])
    head.save(folder, _described(target), "bigram", {})
    return folder


def version(number: int, parent: int = 0, tenants: tuple[str, ...] = ("",)) -> Version:
    return Version(
        number=number,
        parent=parent,
        created_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        tenants=tenants,
        tokens=100,
        expected=1.0,
        parent_expected=0.9,
    )


def publish(store: DrafterStore, weights: Path | None = None, **fields: object) -> Version | None:
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
def learning(folder: Path, target: Path, head: Path, monkeypatch) -> Iterator[TargetScheduler]:
    """A scheduler that learns in a folder; nothing trains."""
    monkeypatch.setattr("services.target_worker.loading.trainer_command", lambda *_: None)
    engine = load_engine(str(target))
    settings = TargetSettings(model=str(target), head=str(head), learn=str(folder))
    drafter = load_learning_drafter(settings, engine)
    assert isinstance(drafter, LearningDrafter)
    scheduler = TargetScheduler(engine, Limits(1024, 256), head=drafter, draft_ahead=False)
    try:
        yield scheduler
    finally:
        scheduler.close()


def begin(scheduler: TargetScheduler, seed: int, tenant: str = "") -> Run:
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
