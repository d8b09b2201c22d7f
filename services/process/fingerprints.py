"""Fingerprints of a worker's model (weights and arithmetic) and of its tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from gammaray.demo_pair import DRAFTER_FILE
from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.vocabulary import vocabulary_sha256
from services.process.adapters import stored_file

UNREADABLE = (GammarayError, OSError, ValueError, KeyError, TypeError, struct.error)
"""What may be raised for weights that cannot be found or read."""

WHOLE_BYTES = 64 << 10
"""Tensors up to this size are read entirely."""

NUM_WINDOWS, WINDOW_BYTES = 8, 2048
"""Windows read of a larger tensor: evenly spaced, the first at its start, the last at its end."""

MAX_HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as the format specifies."""

# Fields of a configuration that do not affect the model: its origin, and a dtype that the settings override.
_NOT_THE_MODEL = frozenset({"transformers_version", "dtype", "torch_dtype"})

# In the order of transformers: the first kind that exists is loaded.
_KINDS = ("model.safetensors", "pytorch_model.bin")

_log = logging.getLogger(__name__)


def model_identity(model: str, *, dtype: str, device: str, deterministic: bool) -> str:
    """Return `sha256/dtype`, followed by `/deterministic/device` in that mode.

    It is empty, with a warning, if the weight files of the loaded model cannot be found or read.
    """
    try:
        digest = weights_sha256(model)
    except UNREADABLE as error:
        message = "%s has no model identity, so its sessions are not bound to its weights: %s"
        _log.warning(message, model, error)
        return ""
    return f"{digest}/{dtype}/deterministic/{device}" if deterministic else f"{digest}/{dtype}"


def weights_sha256(model: str) -> str:
    """Return the fingerprint of a model's configuration and weights.

    Errors of missing and unreadable files are those of `UNREADABLE`.
    """
    path = stored_file(model, "config.json")
    config = json.loads(path.read_text())
    fields = {k: v for k, v in config.items() if k not in _NOT_THE_MODEL and not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for part in _weights(path.parent):
        digest.update(part)
    return digest.hexdigest()


def check_drafter(model: str, target: str) -> None:
    """Refuse a drafter whose `gammaray.json` names the fingerprint of another target or tokenizer.

    Without that file, or with an unknown target, "", nothing is checked.
    """
    path = _drafter_file(model) if target else None
    if path is None:
        return
    try:
        described = json.loads(path.read_text())
        name, trained_for = described["target"]["name"], described["target"]["fingerprint"]
        tokenizer = described["tokenizer"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a drafter whose {DRAFTER_FILE} names the fingerprints of target and tokenizer"
        got = f"{model!r} ({type(error).__name__}: {error})"
        raise InvalidArgumentError("model", got, allowed) from error
    if described.get("format") != 1:
        raise InvalidArgumentError("model", model, f"a drafter whose {DRAFTER_FILE} has format 1")
    try:
        fingerprint = weights_sha256(target)
    except UNREADABLE as error:
        raise InvalidArgumentError("target", f"{target!r} ({error})", "a model's directory") from error
    if fingerprint != trained_for:
        allowed = f"a drafter for {target} ({fingerprint[:12]}); it was trained for {name}"
        raise InvalidArgumentError("model", model, f"{allowed} ({trained_for[:12]})")
    if (digest := vocab_sha256(target)) != tokenizer:
        allowed = f"a drafter for the tokenizer of {target} ({digest[:12]}); it was trained for another one"
        raise InvalidArgumentError("model", model, f"{allowed} ({tokenizer[:12]})")


def _drafter_file(model: str) -> Path | None:
    path = Path(model)
    if path.exists() or path.is_absolute():
        return path / DRAFTER_FILE if (path / DRAFTER_FILE).is_file() else None
    try:
        cached = cached_file(model, DRAFTER_FILE, _raise_exceptions_for_missing_entries=False)
    except (OSError, HFValidationError):  # early-exit:N, or no model of the hub
        return None
    return None if cached is None else Path(cached)


def _weights(folder: Path) -> Iterator[bytes]:
    """Yield the bytes to digest; they do not depend on how tensors are split over safetensors files."""
    files = [*_files(folder), *sorted(folder.glob("adapter_model*"))]
    if not files:
        raise FileNotFoundError(f"no weights in {folder}")
    tensors = []
    for file in files:
        if file.suffix == ".safetensors":
            tensors += [(name, file, kind, start, size) for name, kind, start, size in _tensors(file)]
        else:
            tensors.append((file.name, file, "", 0, file.stat().st_size))
    for name, file, kind, start, size in sorted(tensors):
        yield f"\n{name} {kind} {size}\n".encode()
        with file.open("rb") as source:
            yield from _samples(source, start, size)


def _files(folder: Path) -> Iterable[Path]:
    for name in _KINDS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            files = set(json.loads(index.read_text())["weight_map"].values())
            return [folder / file for file in sorted(files)]
    return []


def _tensors(file: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield each tensor's name, dtype with shape, offset in a safetensors file, and size in bytes."""
    with file.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(source.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            yield name, f"{entry['dtype']} {entry['shape']}", 8 + length + start, end - start


def _samples(source: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    if size <= WHOLE_BYTES:
        source.seek(start)
        yield source.read(size)
        return
    for window in range(NUM_WINDOWS):
        source.seek(start + (size - WINDOW_BYTES) * window // (NUM_WINDOWS - 1))
        yield source.read(WINDOW_BYTES)


def have_other_tokens(model: str, other: str) -> bool:
    """Whether the token ids of two models mean different tokens; a model without a tokenizer may have any."""
    return len({vocab_sha256(model), vocab_sha256(other)} - {""}) == 2


def vocab_sha256(model: str) -> str:
    """Return the fingerprint of a model's vocabulary; empty without a tokenizer."""
    try:
        vocabulary = AutoTokenizer.from_pretrained(model).get_vocab()
    except Exception as error:
        # A model without a tokenizer can be served; transformers raises different errors for it.
        _log.info("no tokenizer in %s: %s", model, error)
        return ""
    return vocabulary_sha256(vocabulary)
