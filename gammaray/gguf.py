"""Headers of GGUF files: what a file contains, read without its weights and without other packages.

A header has the metadata (architecture, sizes, tokenizer) and the name, shape, type and place of each tensor,
which is enough to refuse a file that is truncated or that would be loaded as a different model.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gammaray.errors import InvalidArgumentError

Scalar = int | float | bool | str

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Number of a tensor type -> its name, weights per block and bytes per block."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32

_SCALED_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_PACKAGES = ("gguf", "torch", "accelerate")


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file.

    Attributes:
        name: Name in the file, such as "blk.0.attn_q.weight".
        shape: Lengths of its dimensions, the contiguous one first.
        type: Name of its type, such as "Q4_1".
        offset: Place in the file, in bytes.
        num_bytes: Size in the file.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file.

    Attributes:
        path: The file.
        architecture: Name of its architecture, such as "llama".
        metadata: All metadata but arrays, by key.
        lengths: Lengths of the arrays among the metadata, by key.
        tensors: The tensors, in their order.
    """

    path: str
    architecture: str
    metadata: Mapping[str, Scalar]
    lengths: Mapping[str, int]
    tensors: tuple[GgufTensor, ...]

    @property
    def num_weights(self) -> int:
        """Number of weights of all tensors."""
        return sum(tensor.num_weights for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in the file."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def types(self) -> tuple[str, ...]:
        """Types of the tensors, the one of the most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.num_bytes
        return tuple(sorted(sizes, key=lambda name: -sizes[name]))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, 0 if the file does not say."""
        stated = self.metadata.get(f"{self.architecture}.vocab_size")
        return stated if isinstance(stated, int) else self.lengths.get("tokenizer.ggml.tokens", 0)

    @property
    def context_length(self) -> int:
        """Longest sequence that the model supports, 2^20 tokens if the file does not say."""
        stated = self.metadata.get(f"{self.architecture}.context_length")
        return stated if isinstance(stated, int) and stated > 0 else 2**20

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a completion: those that end a text, a turn or a message."""
        found = (self.metadata.get(f"tokenizer.ggml.{name}") for name in _END_TOKENS)
        return frozenset(token_id for token_id in found if isinstance(token_id, int))

    def summary(self, dtype: str, bytes_per_weight: int) -> str:
        """Return one line that says what the file contains and what loading makes of it.

        Args:
            dtype: Type of the loaded weights, such as "float32".
            bytes_per_weight: Size of one.
        """
        return (
            f"{self.path}: {self.architecture}, {self.num_weights / 1e6:,.1f} million weights in "
            f"{' and '.join(self.types[:3])} ({self.num_bytes / 2**20:,.0f} MiB), dequantised to {dtype} "
            f"({self.num_weights * bytes_per_weight / 2**20:,.0f} MiB)"
        )


def is_gguf(model: str) -> bool:
    """Whether the name of a model is that of a GGUF file, which ends in `.gguf`."""
    return model.lower().endswith(".gguf") and not Path(model).is_dir()


@contextmanager
def pretrained_arguments(model: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the name and the keyword arguments by which transformers' `from_pretrained` loads a model.

    A GGUF file is loaded relative to an empty directory: transformers would prefer a `tokenizer.json` or a
    `tokenizer_config.json` next to the file over what the file contains.
    """
    if not is_gguf(model):
        yield model, {}
        return
    with TemporaryDirectory(prefix="gammaray-gguf-") as empty:
        yield empty, {"gguf_file": str(Path(model).absolute())}


def check_packages(path: str, field: str = "model") -> None:
    """Check that the packages are installed by which transformers reads GGUF files.

    Args:
        path: The file, for the error.
        field: Name of the setting, for the error.

    Raises:
        InvalidArgumentError: A package is missing.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        allowed = (
            f"a model in Hugging Face's format: GGUF files need packages that are not installed "
            f"({', '.join(missing)}): pip install 'gammaray[worker,gguf]'"
        )
        raise InvalidArgumentError(field, path, allowed)


def read_header(path: str, field: str = "model") -> GgufHeader:
    """Read the header of a GGUF file and check that the file is complete.

    Args:
        path: The file.
        field: Name of the setting, for the error.

    Raises:
        InvalidArgumentError: There is no such file; it is not a GGUF file, truncated or corrupt; or it has
            features that are lost when transformers loads it.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Reader(data).header(path)
    except OSError as error:
        raise InvalidArgumentError(field, path, f"a GGUF file that can be read ({error.strerror})") from None
    except ValueError as error:  # mmap refuses empty files
        raise InvalidArgumentError(field, path, f"a complete GGUF file ({error})") from None
    if lost := _lost(header):
        raise InvalidArgumentError(field, path, f"a GGUF file without features that would be lost: {lost}")
    return header


def _lost(header: GgufHeader) -> str:
    """Return what transformers would silently leave out, "" for nothing."""
    if header.metadata.get("split.count", 1) not in (0, 1):
        return "it is one part of several; `llama-gguf-split --merge` of llama.cpp joins them"
    names = {tensor.name for tensor in header.tensors}
    for name in _SCALED_ROTARY:
        if name in names:
            return f"transformers does not read {name}, the scaling of its rotary embedding"
    kind = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if kind != "none":
        return f"transformers does not read the scaling of its rotary embedding ({kind})"
    return ""


class _Reader:
    """Reads a header from the start of a file; each method that reads moves on.

    All methods raise ValueError with the defect.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def header(self, path: str) -> GgufHeader:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with the letters GGUF")
        self._at = len(_MAGIC)
        (version,) = self._numbers("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, supported are little-endian 2 and 3")
        num_tensors, num_entries = self._numbers("QQ")
        metadata: dict[str, Scalar] = {}
        lengths: dict[str, int] = {}
        for _ in range(num_entries):
            self._entry(metadata, lengths)
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise ValueError("its metadata has no general.architecture")
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"its alignment is {alignment}")
        if not entries:
            raise ValueError("it has no weights")
        start = -(-self._at // alignment) * alignment
        tensors = tuple(
            self._placed(name, shape, kind, start + offset) for name, shape, kind, offset in entries
        )
        end = max(tensor.offset + tensor.num_bytes for tensor in tensors)
        if end > len(self._data):
            raise ValueError(f"it has {len(self._data):,} bytes and its header describes {end:,}")
        return GgufHeader(path, architecture, metadata, lengths, tensors)

    def _entry(self, metadata: dict[str, Scalar], lengths: dict[str, int]) -> None:
        key = self._text()
        (kind,) = self._numbers("I")
        if kind == _ARRAY:
            kind, lengths[key] = self._numbers("IQ")
            if kind == _STRING:
                for _ in range(lengths[key]):
                    self._skip(*self._numbers("Q"))
            else:
                self._skip(lengths[key] * struct.calcsize(_scalar(kind, key)))
        elif kind == _STRING:
            metadata[key] = self._text()
        else:
            (metadata[key],) = self._numbers(_scalar(kind, key))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text()
        (num_dimensions,) = self._numbers("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"its tensor {name!r} has {num_dimensions} dimensions")
        shape = self._numbers("Q" * num_dimensions)
        kind, offset = self._numbers("IQ")
        return name, shape, kind, offset

    @staticmethod
    def _placed(name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        if kind not in TENSOR_TYPES:
            raise ValueError(f"its tensor {name!r} has the unknown type {kind}")
        type_name, per_block, block_bytes = TENSOR_TYPES[kind]
        if shape[0] % per_block or 0 in shape:
            raise ValueError(f"its tensor {name!r} of type {type_name} has the shape {list(shape)}")
        return GgufTensor(name, shape, type_name, offset, math.prod(shape) // per_block * block_bytes)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        at = self._at
        self._skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, at)

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        at = self._at
        self._skip(length)
        return self._data[at : self._at].decode(errors="replace")

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise ValueError(f"it ends within its header, after {len(self._data):,} bytes")


def _scalar(kind: int, key: str) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"its metadata {key!r} has the unknown type {kind}")
    return _SCALARS[kind]
