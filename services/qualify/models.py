"""Loads the models of a pair as workers do, and reports their facts or why they cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from gammaray.config import DraftSettings, TargetSettings, WorkerSettings, settings_error
from gammaray.demo_pair import early_exit_layers, resolve_model
from gammaray.errors import InvalidArgumentError, NotFoundError
from gammaray.gguf import is_gguf, pretrained_arguments, read_header
from gammaray.qualify.measured import ModelFacts, QualifyTask
from services.engine.core.errors import UnsupportedModelError
from services.engine.core.model import check_config, load_config
from services.engine.engine import Engine
from services.engine.loader import load_worker_engine
from services.heads.loading import names_head
from services.process.fingerprints import check_drafter, vocab_sha256
from services.speculation.local_drafter import LocalDrafter
from services.target.loading import load_local_drafter

_ALLOWED = "a directory or GGUF file with a causal LM, or the name of one on the hub or in its cache"
_HEAD_REFUSAL = "it is a head, which --head measures, in the target worker"
_ALLOWED_HEADS = "a directory or hub name of a head, or of a draft model with the target's vocabulary"
_SETTINGS: Mapping[str, type[WorkerSettings]] = {"target": TargetSettings, "draft": DraftSettings}


@dataclass(frozen=True)
class Source:
    """A model that was found but not loaded.

    Attributes:
        role: "target" or "draft".
        name: The name as given.
        path: Directory, hub name or GGUF file.
        facts: Facts read from its files.
        config: Configuration of its text part; None when transformers does not support it.
        settings: Settings that its worker would use.
        draft_for: Of a draft, the target's directory, hub name or GGUF file; else None.
    """

    role: str
    name: str
    path: str
    facts: ModelFacts
    config: PretrainedConfig | None
    settings: WorkerSettings
    draft_for: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A model that was loaded, or the reason why it could not be.

    Attributes:
        facts: Facts about it.
        engine: None when it cannot be served.
        settings: Settings that its worker would use.
    """

    facts: ModelFacts
    engine: Engine | None
    settings: WorkerSettings


def find(role: str, name: str, task: QualifyTask, target: Source | None = None) -> Source:
    """Read a model's configuration and tokenizer, but not its weights.

    Args:
        role: "target" or "draft".
        name: The model; of a draft also `early-exit:N`.
        task: What to measure.
        target: Of a draft, its target.

    Raises:
        InvalidArgumentError: There is no such model, or a setting is wrong.
    """
    path = resolve_model(name, role)
    weights: dict[str, Any] = {} if task.draft_weights is None else {"draft_weights": task.draft_weights}
    try:
        settings = _SETTINGS[role](model=name, **weights)
    except ValidationError as error:
        raise settings_error(error) from None
    if target is not None and early_exit_layers(name) is not None:
        early_exit_layers(name, getattr(target.config, "num_hidden_layers", None))
        facts = target.facts.model_copy(update={"name": name})
        return Source(role, name, path, facts, target.config, settings, target.path)
    if is_gguf(path):
        read_header(path, role)
    elif not Path(path).is_dir() and path.startswith((".", "/", "~")):
        raise InvalidArgumentError(role, f"{name!r}, which does not exist", _ALLOWED)
    try:
        config = load_config(path)
    except UnsupportedModelError as error:
        reason = _HEAD_REFUSAL if role == "draft" and names_head(path) else error.reason
        return Source(role, name, path, ModelFacts(name=name, refusal=reason), None, settings)
    except NotFoundError as error:
        raise InvalidArgumentError(role, f"{name!r} ({_first_line(error)})", _ALLOWED) from None
    text = config.get_text_config()
    digest = vocab_sha256(path)
    facts = ModelFacts(
        name=name,
        architecture=str(config.model_type),
        vocab_size=getattr(text, "vocab_size", None) or 0,
        tokenizer_sha256=digest,
        max_context=getattr(text, "max_position_embeddings", None) or 0,
    )
    draft_for = None if target is None else target.path
    return Source(role, name, path, _refused(facts, role, config), text, settings, draft_for)


def load(source: Source) -> Loaded:
    """Load a model as its worker would, with all the checks of a start.

    Raises:
        InvalidArgumentError: Its weights are missing or broken.
    """
    settings = source.settings
    if source.facts.refusal:
        return Loaded(source.facts, None, settings)
    try:
        if source.draft_for is not None:
            check_drafter(source.path, source.draft_for)
        engine = load_worker_engine(source.path, settings, draft_for=source.draft_for)
    except UnsupportedModelError as error:
        return Loaded(source.facts.model_copy(update={"refusal": error.reason}), None, settings)
    except NotFoundError as error:
        raise InvalidArgumentError(source.role, f"{source.name!r} ({_first_line(error)})", _ALLOWED) from None
    found = {
        "vocab_size": engine.vocab_size,
        "max_context": engine.max_context,
        "device": engine.device.type,
        "dtype": str(engine.dtype).removeprefix("torch."),
    }
    return Loaded(source.facts.model_copy(update=found), engine, settings)


def load_local(name: str, source: Source, target: Engine) -> tuple[ModelFacts, LocalDrafter | None]:
    """Load what drafts in a target worker, as that worker would.

    Args:
        name: The head or draft model.
        source: Its target.
        target: The same, loaded.

    Returns:
        Facts about it, and the drafter; None if it cannot be served.

    Raises:
        InvalidArgumentError: There is no such model.
    """
    assert isinstance(source.settings, TargetSettings)
    path = resolve_model(name, "draft", "head")
    if not Path(path).is_dir() and path.startswith((".", "/", "~")):
        raise InvalidArgumentError("head", f"{name!r}, which does not exist", _ALLOWED_HEADS)
    try:
        drafter = load_local_drafter(source.settings.model_copy(update={"head": name}), target)
    except UnsupportedModelError as error:
        return ModelFacts(name=name, refusal=error.reason), None
    except InvalidArgumentError as error:
        return ModelFacts(name=name, refusal=str(error)), None
    except NotFoundError as error:
        raise InvalidArgumentError("head", f"{name!r} ({_first_line(error)})", _ALLOWED_HEADS) from None
    engine = drafter.engine
    facts = ModelFacts(
        name=name,
        architecture="EAGLE-3 head" if drafter.taps else "draft model",
        vocab_size=engine.vocab_size,
        tokenizer_sha256=source.facts.tokenizer_sha256,
        max_context=engine.max_context,
        device=engine.device.type,
        dtype=str(engine.dtype).removeprefix("torch."),
    )
    return facts, drafter


def eos_token_ids(source: Source) -> tuple[int, ...]:
    """Return the tokens that end a completion, from the same files as `transformers` generate."""
    if is_gguf(source.path):
        return tuple(sorted(read_header(source.path).eos_token_ids))
    try:
        found: Any = GenerationConfig.from_pretrained(source.path).eos_token_id
    except OSError:  # no such file: older models have none
        found = None
    if found is None:
        found = getattr(source.config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def encode(source: Source, texts: tuple[str, ...], *, chat: bool = False) -> list[list[int]]:
    """Return the token ids of each text, with the model's tokenizer.

    Args:
        source: The model.
        texts: The texts.
        chat: Make each the message of a user, in the model's chat template.

    Raises:
        InvalidArgumentError: The model has no chat template.
    """
    tokenizer = _tokenizer(source.path)
    if not chat:
        return [tokenizer(text)["input_ids"] for text in texts]
    if not tokenizer.chat_template:
        raise InvalidArgumentError("chat", True, f"false: {source.name} has no chat template")
    messages = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True)["input_ids"]
        for one in messages
    ]


def _tokenizer(path: str) -> Any:
    with pretrained_arguments(path) as (source, arguments):
        return AutoTokenizer.from_pretrained(source, **arguments)


def _refused(facts: ModelFacts, role: str, config: PretrainedConfig) -> ModelFacts:
    """Add the reason why the model cannot be used, as far as known before loading it."""
    try:
        check_config(facts.name, config)
    except UnsupportedModelError as error:
        return facts.model_copy(update={"refusal": error.reason})
    if role == "target" and not facts.tokenizer_sha256:
        return facts.model_copy(update={"refusal": "it has no tokenizer, which orchestrators need"})
    return facts


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
