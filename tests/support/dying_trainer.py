"""Training processes, each of which kills itself at another one of its steps; the last one trains on.

    python -m tests.support.dying_trainer NOTES FOLDER TARGET DRAFTER

NOTES is a file to which each adds the step at which it dies. They are forks of this process, which has the
libraries loaded.
"""

import os
import pkgutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.train.live import trainer
from services.train.live.__main__ import train_until

STEPS: tuple[tuple[str, str, str, int | str, bool], ...] = (
    # Name, module or class, function, in which call or for which file, and whether at its end.
    ("loading the target", "services.train.live.trainer", "load_model", 1, False),
    ("loading the drafter", "services.train.live.trainer.Trainer", "_drafter", 1, True),
    ("reading streams", "numpy", "load", 3, False),
    ("noting a step", "gammaray.learning.folder", "replace_file", "training.json", False),
    ("training", "torch.optim.AdamW", "step", 5, True),
    ("scoring", "services.train.live.trainer", "evaluate", 2, False),
    ("writing the weights", "services.train.trainable", "save_file", 1, True),
    ("writing the card", "services.train.trainable", "write_json", "gammaray.json", False),
    ("moving the version", "gammaray.learning.folder.DrafterFolder", "_change", 1, False),
    ("noting the version", "gammaray.learning.folder", "replace_file", "state.json", False),
    ("after the version", "gammaray.learning.folder", "replace_file", "state.json", True),
)
START, NONE = "start", "none"


def die_at(owner: Any, name: str, where: int | str, *, at_end: bool) -> None:
    """Replace a function so that this process is killed in one of its calls, or when it writes a file."""
    real: Callable[..., Any] = getattr(owner, name)
    count = 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        is_it = where in (count, getattr(args[0], "name", None) if args else None)
        if is_it and not at_end:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def train(step: str, folder: str, target: str, drafter: str) -> None:
    parent = os.getppid()
    if step == START:
        os.kill(os.getpid(), signal.SIGKILL)
    for name, owner, function, where, at_end in STEPS:
        if name == step:
            die_at(pkgutil.resolve_name(owner), function, where, at_end=at_end)
    train_until(lambda: os.getppid() != parent, time.sleep, Path(folder), target, drafter)


def main() -> None:
    """Start one process after another."""
    notes, *given = sys.argv[1:]
    trainer.MIN_TOKENS, trainer.RATE, trainer.MIN_GAIN = 300, 3e-3, 0.0
    for step in (START, *(name for name, *_ in STEPS), NONE):
        with Path(notes).open("a") as file:
            file.write(f"{step}\n")
        if (child := os.fork()) == 0:
            train(step, *given)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
