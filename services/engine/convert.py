"""Converts a GGUF file to a directory in Hugging Face's format: safetensors, configuration, tokenizer.

    python -m services.engine.convert FILE.gguf DIRECTORY
    python -m services.engine.convert FILE.gguf DIRECTORY --dtype float32

A directory loads faster than the file and needs no reader of GGUF files.
In bfloat16, the default, dequantised weights are rounded once more; float32 keeps their values.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from gammaray.errors import GammarayError, InvalidArgumentError
from gammaray.gguf import is_gguf, pretrained_arguments, read_header
from services.engine.core.gguf_model import load_gguf_config, load_gguf_module
from services.engine.core.model import DTYPES, check_config


def convert(path: str, directory: Path, dtype: str = "bfloat16") -> None:
    """Write the model and the tokenizer of a GGUF file to a new directory, which appears once it is complete.

    Args:
        path: The file.
        directory: The directory to create; its parents are created, too.
        dtype: "bfloat16", "float16" or "float32".

    Raises:
        InvalidArgumentError: The file cannot be read, or the directory exists.
        UnsupportedModelError: The model cannot be served exactly.
    """
    if not is_gguf(path):
        raise InvalidArgumentError("file", path, "the name of a GGUF file, which ends in .gguf")
    if directory.exists():
        raise InvalidArgumentError("directory", str(directory), "a directory that does not exist")
    header = read_header(path, "file")
    config = load_gguf_config(path)
    check_config(path, config)
    module = load_gguf_module(path, config, DTYPES[dtype])
    if header.eos_token_ids and module.generation_config is not None:
        module.generation_config.eos_token_id = sorted(header.eos_token_ids)
    with pretrained_arguments(path) as (source, arguments):
        tokenizer = AutoTokenizer.from_pretrained(source, **arguments)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        made = Path(scratch) / directory.name
        module.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for file in made.iterdir():
            file.chmod(0o644)  # weights are written for their owner only; a container has another user
        made.rename(directory)


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
