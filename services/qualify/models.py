"""Loads the models of a pair as workers do, and reports their facts or why they cannot be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import AutoTokenizer

from gammaray.config import DraftSettings, TargetSettings, WorkerSettings, settings_error
from gammaray.demo_pair import resolve_model
from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.gguf import pretrained_arguments
from gammaray.qualify.measured import ModelFacts
from services.draft_worker.worker import DraftWorker
from services.engine.choice import uses_vllm
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import eos_token_ids
from services.engine.engine import Engine
from services.engine.loader import load_worker_engine
from services.process.fingerprints import vocab_sha256
from services.scheduling.planning import Limits
from services.scheduling.scheduler import Scheduler
from services.speculation.local_drafter import LocalDrafter
from services.target_worker.loading import load_local_drafter
from services.target_worker.scheduler import TargetScheduler
from services.vocabulary.translation import load_translation, target_size

_ALLOWED = "a directory or GGUF file with a causal LM, or the name of one on the hub or in its cache"


@dataclass
class Candidate:
    """What drafts for a target.

    Attributes:
        facts: Facts about it.
        scheduler: Of the draft worker; None for what drafts in the target worker.
        head: What drafts in the target worker.
        shared: Tokens of the target that it can propose; None: all.
    """

    facts: ModelFacts
    scheduler: Scheduler[Any] | None = None
    head: LocalDrafter | None = None
    shared: frozenset[int] | None = None

    def share_of(self, prompts: Sequence[Sequence[int]]) -> float | None:
        """Return the share of the prompts' tokens that it can propose; None: the vocabularies are equal."""
        used = [token for prompt in prompts for token in prompt]
        return None if self.shared is None else sum(token in self.shared for token in used) / len(used)


class Target:
    """The target of all candidates.

    Args:
        name: Directory, hub name, GGUF file or "demo".

    Attributes:
        path: Directory, hub name or GGUF file.
        settings: Settings that its worker would use.
        facts: Facts about it, once it is loaded.

    Raises:
        InvalidArgumentError: There is no such model, or a setting is wrong.
    """

    def __init__(self, name: str) -> None:
        self.path, self.settings = _found("target", name), _settings(TargetSettings, name)
        self.facts = ModelFacts(name=name)
        self._engine: Engine | None = None

    def load(self) -> None:
        """Load it; if it cannot be served, the facts say why.

        Raises:
            InvalidArgumentError: Its weights are missing or broken.
        """
        try:
            self._engine = load_worker_engine(self.path, self.settings)
        except NotFoundError as error:
            raise _missing("target", self.facts.name, error) from None
        except UnsupportedModelError as error:
            self.facts = ModelFacts(name=self.facts.name, refusal=error.reason)
            return
        refusal = "" if vocab_sha256(self.path) else "it has no tokenizer, which orchestrators need"
        self.facts = _facts(self.facts.name, self._engine, refusal)

    @property
    def engine(self) -> Engine:
        """The model; it must be loaded and servable."""
        assert self._engine is not None
        return self._engine

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        return eos_token_ids(self.path)

    def scheduler(self, head: LocalDrafter | None = None) -> TargetScheduler:
        """Return the scheduler of its worker with what drafts in it, without draft-ahead."""
        self.engine.tap([])  # of the candidate before
        limits = Limits(self.settings.max_batch_tokens, self.settings.prefill_chunk)
        return TargetScheduler(self.engine, limits, head=head, draft_ahead=False)

    def encode(self, texts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
        """Return the token ids of each text.

        Args:
            texts: The texts.
            chat: Make each the message of a user, in the model's chat template.

        Raises:
            InvalidArgumentError: The model has no chat template.
        """
        with pretrained_arguments(self.path) as (source, arguments):
            tokenizer: Any = AutoTokenizer.from_pretrained(source, **arguments)
        if not chat:
            return [tokenizer(text)["input_ids"] for text in texts]
        if not tokenizer.chat_template:
            raise InvalidArgumentError("chat", True, f"false: {self.facts.name} has no chat template")
        return [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
            )["input_ids"]
            for text in texts
        ]


def load_draft(name: str, target: Target) -> Candidate:
    """Load a draft as its worker would, without draft-ahead, which runs while the target verifies.

    Raises:
        InvalidArgumentError: There is no such model, or a setting is wrong.
    """
    path = _found("draft", name)
    settings = _settings(DraftSettings, name, target=target.path, draft_ahead=False)
    try:
        model, scheduler = DraftWorker(settings).load_model(path)
    except NotFoundError as error:
        raise _missing("draft", name, error) from None
    except (UnsupportedModelError, InvalidArgumentError) as error:
        return Candidate(ModelFacts(name=name, refusal=str(error)))
    assert isinstance(scheduler, Scheduler)
    facts = replace(_facts(name, scheduler.engine), vocab_size=model.vocab_size)
    return Candidate(facts, scheduler, shared=_shared(path, scheduler.engine, target))


def load_head(name: str, target: Target) -> Candidate:
    """Load what drafts in a target worker, as that worker would.

    Raises:
        InvalidArgumentError: There is no such model.
    """
    _found("head", name)
    if target.facts.refusal:
        return Candidate(ModelFacts(name=name))
    try:
        head = load_local_drafter(target.settings.model_copy(update={"head": name}), target.engine)
    except NotFoundError as error:
        raise _missing("head", name, error) from None
    except (UnsupportedModelError, InvalidArgumentError) as error:
        return Candidate(ModelFacts(name=name, refusal=str(error)))
    return Candidate(_facts(name, head.engine), head=head)


def _found(role: str, name: str) -> str:
    path = resolve_model(name, "target" if role == "target" else "draft")
    if not Path(path).exists() and path.startswith((".", "/", "~")):
        raise InvalidArgumentError(role, f"{name!r}, which does not exist", _ALLOWED)
    return path


def _settings(kind: type[Any], name: str, **given: Any) -> Any:
    try:
        settings: WorkerSettings = kind(model=name, **given)
    except ValidationError as error:
        raise settings_error(error) from None
    if uses_vllm(settings.engine, settings.device):  # its scheduler does not run step by step
        if settings.engine == "vllm":
            raise InvalidArgumentError("engine", "vllm", "auto, native or transformers")
        settings = settings.model_copy(update={"engine": "transformers"})
    return settings


def _missing(role: str, name: str, error: NotFoundError) -> InvalidArgumentError:
    reason = str(error).strip().splitlines()[0]
    return InvalidArgumentError(role, f"{name!r} ({reason})", _ALLOWED)


def _facts(name: str, engine: Engine, refusal: str = "") -> ModelFacts:
    return ModelFacts(
        name=name,
        refusal=refusal,
        vocab_size=engine.vocab_size,
        max_context=engine.max_context,
        kernel=engine.kernel,
    )


def _shared(path: str, engine: Engine, target: Target) -> frozenset[int] | None:
    digest, wanted = vocab_sha256(path), vocab_sha256(target.path)
    if digest in ("", wanted) and target_size(target.path) in (0, engine.vocab_size):
        return None
    return frozenset(load_translation(path, engine.vocab_size, target.path).common.target_ids)
