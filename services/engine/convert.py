"""Converts a GGUF file to a directory in Hugging Face's format: safetensors, configuration, tokenizer.

    python -m services.engine.convert FILE.gguf DIRECTORY
    python -m services.engine.convert FILE.gguf DIRECTORY --dtype float32

In bfloat16, the default, dequantised weights are rounded once more; float32 keeps their values.

transformers reads the file. It skips tensors without a place in the model, initialises at random what the
file lacks, and ignores some settings, all without an error; such files are refused here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from gammaray.demo_pair import is_gguf
from gammaray.errors import GammarayError, InvalidArgumentError
from services.engine.core.errors import InvalidModelError, UnsupportedModelError
from services.engine.core.model import DTYPES, check_config

_SCALED_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def convert(path: str, directory: Path, dtype: str = "bfloat16") -> None:
    """Write the model and the tokenizer of a GGUF file to a new directory, which appears once it is complete.

    Args:
        directory: The directory to create; its parents are created, too.
        dtype: "bfloat16", "float16" or "float32".

    Raises:
        InvalidArgumentError: The file cannot be read, or the directory exists.
        UnsupportedModelError: The model cannot be served exactly, or the reader is not installed.
    """
    if not is_gguf(path):
        raise InvalidArgumentError("file", path, "the name of a GGUF file, which ends in .gguf")
    if directory.exists():
        raise InvalidArgumentError("directory", str(directory), "a directory that does not exist")
    file = _File(path)
    # transformers would prefer a tokenizer next to the file over the one that the file contains.
    with TemporaryDirectory(prefix="gammaray-gguf-") as empty:
        given = {"pretrained_model_name_or_path": empty, "gguf_file": str(Path(path).absolute())}
        config = _config(file, given)
        module = _module(file, given, config, DTYPES[dtype])
        tokenizer = AutoTokenizer.from_pretrained(**given)
    if ends := {file.value(f"tokenizer.ggml.{name}") for name in _END_TOKENS} - {None}:
        assert module.generation_config is not None
        module.generation_config.eos_token_id = sorted(ends)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch) / directory.name
        module.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for written in made.iterdir():
            written.chmod(0o644)  # weights are written for their owner only; a container has another user
        made.rename(directory)


class _File:
    """The metadata of a GGUF file, and the names and sizes of its tensors."""

    def __init__(self, path: str) -> None:
        try:
            from gguf import GGUFReader  # of the extra `gguf`
        except ImportError:
            reason = "its weights need the package gguf, which is not installed (pip install gguf)"
            raise UnsupportedModelError(path, reason) from None
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except OSError as error:
            allowed = f"a GGUF file that can be read ({error.strerror})"
            raise InvalidArgumentError("file", path, allowed) from None
        except Exception as error:  # its kind depends on the damage
            raise InvalidArgumentError("file", path, f"a complete GGUF file ({error})") from None
        self.num_weights = sum(int(tensor.n_elements) for tensor in self._reader.tensors)
        self.architecture = self.value("general.architecture")
        if lost := self._lost():
            allowed = f"a GGUF file without features that would be lost: {lost}"
            raise InvalidArgumentError("file", path, allowed)

    def value(self, key: str) -> Any:
        """Return a value of the metadata; None if there is none."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def own(self, key: str) -> Any:
        """Return a value of the architecture's metadata; None if there is none."""
        return self.value(f"{self.architecture}.{key}")

    def _lost(self) -> str:
        """Return what transformers would silently leave out, "" for nothing."""
        if self.value("split.count") not in (None, 0, 1):
            return "it is one part of several; `llama-gguf-split --merge` of llama.cpp joins them"
        names = {tensor.name for tensor in self._reader.tensors}
        for name in _SCALED_ROTARY:
            if name in names:
                return f"transformers does not read {name}, the scaling of its rotary embedding"
        if (kind := self.own("rope.scaling.type")) not in (None, "none"):
            return f"transformers does not read the scaling of its rotary embedding ({kind})"
        return ""


def _config(file: _File, given: Mapping[str, str]) -> PretrainedConfig:
    """Return the configuration that transformers derives from a file's metadata."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(**given)
    except Exception as error:  # its kind depends on the file's content
        raise UnsupportedModelError(file.path, f"transformers cannot read it: {error}") from error
    window, length = file.own("attention.sliding_window") or 0, file.own("context_length") or 2**20
    if 0 < window < length and window != getattr(config.get_text_config(), "sliding_window", None):
        reason = f"transformers does not read the sliding window of {window} tokens of {file.architecture}"
        raise UnsupportedModelError(file.path, reason)
    check_config(file.path, config)
    return config


def _module(
    file: _File, given: Mapping[str, str], config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model of a file, dequantised to `dtype`."""
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            **given,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # its kind depends on the file's content
        reason = f"transformers cannot load it as a causal model: {error}"
        raise UnsupportedModelError(file.path, reason) from error
    module: PreTrainedModel = result[0]
    info: Mapping[str, Any] = result[1]
    if mismatched := sorted(info["mismatched_keys"]):
        key, stored, expected = mismatched[0]
        allowed = f"{list(expected)}, which its metadata say"
        got = f"the shape {list(stored)}"
        raise InvalidModelError(file.path, Path(file.path).name, key, got, allowed)
    if missing := sorted(info["missing_keys"]):
        reason = f"it lacks {len(missing)} weights of the model, such as {missing[0]}"
        raise UnsupportedModelError(file.path, reason)
    num_weights = sum(parameter.numel() for parameter in module.parameters())
    if num_weights != file.num_weights:
        reason = f"transformers uses {num_weights:,} of its {file.num_weights:,} weights"
        raise UnsupportedModelError(file.path, reason)
    return module


def main(argv: list[str] | None = None) -> int:
    """Convert the file of a command line; return the exit status."""
    parser = argparse.ArgumentParser("services.engine.convert", description="Convert a GGUF file.")
    parser.add_argument("file", help="the GGUF file")
    parser.add_argument("directory", type=Path, help="the directory to create")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="type of the weights")
    options = parser.parse_args(argv)
    try:
        convert(options.file, options.directory, options.dtype)
    except GammarayError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
