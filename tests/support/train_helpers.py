"""Small runs of `gammaray train` on the demo target."""

import json
import re
from pathlib import Path
from typing import Any

import torch

from gammaray.qualify.training import TrainTask
from services.demo_pair import TARGET_DIR
from services.train.answers.store import Sequence
from services.train.run import run

PROMPTS = ("def ", "import os", "for i in range(", "class Point:", "return self.", "The list is ")


def make_task(folder: Path, prompts: tuple[str, ...] = PROMPTS * 6, **changes: Any) -> TrainTask:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "prompts.json"
    file.write_text(json.dumps(prompts))
    given = {
        **{"target": str(TARGET_DIR), "prompts": str(file) if prompts else "", "chat": False},
        **{"out": str(folder / "drafter"), "work": str(folder / "work")},
        **{"draft_vocab": 512, "tokens": 2500, "max_tokens": 48, "train_tokens": 256},
        **{"steps_per_report": 15, "threads": 1},
    }
    return TrainTask(**given | changes)


def run_until(task: TrainTask, pattern: str) -> tuple[list[str], bool]:
    lines: list[str] = []
    done = run(task, lines.append, lambda: any(re.search(pattern, line) for line in lines))
    return lines, done


def overlaps(lines: list[str]) -> list[list[float]]:
    return [json.loads(found[1]) for line in lines if (found := re.search(r"overlap (\[.*?\])", line))]


def losses(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"loss ([\d.]+)", line))]


def make_sequence(number: int, prompt: int, answer: int, vocab: int = 64) -> Sequence:
    """Return a random answer of which the target gives its tokens 0.7, and their successors 0.3."""
    random = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(vocab, (prompt + answer,), generator=random)
    top = torch.stack((ids[prompt:], (ids[prompt:] + 1) % vocab), 1)
    logs = torch.tensor([0.7, 0.3]).log().expand(answer, 2)
    return Sequence(ids.int().numpy(), prompt, 0.0, top.numpy(), logs.half().numpy(), number)
