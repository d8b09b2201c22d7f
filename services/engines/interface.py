"""What a worker needs of an engine: a check of a drafter's form, and what it serves once it has loaded."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from gammaray.config import DraftSettings, TargetSettings, parse_adapters
from gammaray.engines import EngineFacts
from gammaray.errors import InvalidArgumentError
from services.process.adapters import adapter_sha256
from services.process.fingerprints import model_identity, vocab_sha256
from services.scheduling.planning import Limits
from services.scheduling.scheduler import Scheduler
from services.streaming.messages import Model


class Served(NamedTuple):
    """A loaded model, and its scheduler, which the engine's thread drives."""

    model: Model
    scheduler: Scheduler[Any]


class Loaded(Protocol):
    """What both engines say of a model that they have loaded."""

    vocab_size: int
    max_context: int
    kernel: str

    @property
    def dtype(self) -> Any: ...
    @property
    def device(self) -> Any: ...


class Engine(Protocol):
    """Loads models; `facts` say which settings it serves."""

    facts: EngineFacts

    def refuse_draft(self, path: str, target: str, settings: DraftSettings) -> InvalidArgumentError | None:
        """Return why it does not serve a drafter, before it is loaded, or None; `target` may be ""."""

    def load_target(self, path: str, settings: TargetSettings, limits: Limits) -> Served:
        """Load a target, with what drafts in it.

        Raises:
            UnsupportedModelError: It cannot be served exactly; the reason is in the error.
            NotFoundError: There is no such model.
            InvalidArgumentError: A setting does not suit the model, the head or this machine.
        """

    def load_draft(self, path: str, target: str, settings: DraftSettings, limits: Limits) -> Served:
        """Load a drafter; raises what `load_target` does."""


def target_model(path: str, settings: TargetSettings, facts: EngineFacts, loaded: Loaded) -> Model:
    """Return what a worker says of its target."""
    identity = model_identity(
        path,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device).partition(":")[0],
        deterministic=settings.deterministic,
    )
    return Model(
        settings.model,
        loaded.vocab_size,
        loaded.max_context,
        vocab_sha256(path),
        kernel=loaded.kernel,
        identity=identity,
        takes_trees=facts.takes_trees,
        adapters={
            name: f"{identity}/lora/{adapter_sha256(directory)}" if identity else ""
            for name, directory in parse_adapters(settings.lora).items()
        },
    )
