"""Converts a GGUF file to a directory in Hugging Face's format, with its weights in bfloat16.

    python -m services.engine.convert FILE.gguf DIRECTORY

transformers reads the file. It skips tensors without a place in the model, initialises at random what the
file lacks, and ignores some settings, all without an error; such files are refused here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from gammaray.errors import GammarayError, InvalidArgumentError
from services.engine.core.checkpoint import check_loading
from services.engine.core.errors import UnsupportedModelError

_SCALED_ROTARY = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def convert(path: str, directory: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a new directory, which appears once it is complete.

    InvalidArgumentError if the file cannot be read, or the directory exists; UnsupportedModelError if
    transformers cannot load the file, or would load another model.
    """
    if directory.exists():
        raise InvalidArgumentError("directory", str(directory), "a directory that does not exist")
    reader = _reader(path)
    # transformers would prefer a tokenizer next to the file over the one that the file contains.
    with TemporaryDirectory(prefix="gammaray-gguf-") as empty, _read_once(reader):
        source = {"pretrained_model_name_or_path": empty, "gguf_file": str(Path(path).absolute())}
        module = _module(path, source)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        _check_nothing_ignored(path, reader, module)
        if ends := {_value(reader, f"tokenizer.ggml.{name}") for name in _END_TOKENS} - {None}:
            assert module.generation_config is not None
            module.generation_config.eos_token_id = sorted(ends)
        _write(directory, module, tokenizer)


def _write(directory: Path, module: PreTrainedModel, tokenizer: Any) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        folder = Path(scratch) / directory.name
        module.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(0o644)  # weights are written for their owner only; a container has another user
        folder.rename(directory)


def _reader(path: str) -> Any:
    try:
        from gguf import GGUFReader  # of the extra `gguf`

        class Reader(GGUFReader):
            """Slices a plain view of the mapped file: slicing a `numpy.memmap` takes ten times as long."""

            @property
            def data(self) -> Any:
                return self._view

            @data.setter
            def data(self, mapped: Any) -> None:
                self._view = np.asarray(mapped)

        return Reader(path)
    except Exception as error:  # its kind depends on the damage
        raise InvalidArgumentError("file", path, f"a GGUF file that can be read ({error})") from None


@contextmanager
def _read_once(reader: Any) -> Iterator[None]:
    """Let transformers take the reader of the file, which it would read three times.

    A vocabulary of 150,000 tokens takes many seconds each time. Of its progress bars, that of tensors stays.
    """
    gguf: Any = import_module("gguf")
    bars = import_module("transformers.utils.logging")
    usual, has_bars = gguf.GGUFReader, bars.is_progress_bar_enabled()
    gguf.GGUFReader = lambda path: reader
    bars.disable_progress_bar()
    try:
        yield
    finally:
        gguf.GGUFReader = usual
        if has_bars:
            bars.enable_progress_bar()


def _value(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _module(path: str, source: Mapping[str, str]) -> PreTrainedModel:
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # its kind depends on the file's content
        reason = f"transformers cannot load it as a causal model: {error}"
        raise UnsupportedModelError(path, reason) from error
    module: PreTrainedModel = result[0]
    check_loading(path, result[1], module.config.get_text_config().num_hidden_layers)
    return module


def _check_nothing_ignored(path: str, reader: Any, module: PreTrainedModel) -> None:
    """Check that transformers read all of a file that changes its logits."""
    architecture = _value(reader, "general.architecture")
    scaling = _value(reader, f"{architecture}.rope.scaling.type")
    window = _value(reader, f"{architecture}.attention.sliding_window")
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    used = sum(parameter.numel() for parameter in module.parameters())
    ignored = ""
    if scaling not in (None, "none") or _SCALED_ROTARY & {tensor.name for tensor in reader.tensors}:
        ignored = "the scaling of its rotary embedding"
    elif window and window != getattr(module.config.get_text_config(), "sliding_window", None):
        ignored = f"its sliding window of {window} tokens"
    elif stored != used:
        ignored = f"all but {used:,} of its {stored:,} weights"
    if ignored:
        raise UnsupportedModelError(path, f"transformers does not read {ignored}")


def main() -> int:
    """Convert the file of a command line; return the exit status."""
    parser = argparse.ArgumentParser("services.engine.convert", description="Convert a GGUF file.")
    parser.add_argument("file", help="the GGUF file")
    parser.add_argument("directory", type=Path, help="the directory to create")
    options = parser.parse_args()
    try:
        convert(options.file, options.directory)
    except GammarayError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(options.directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
