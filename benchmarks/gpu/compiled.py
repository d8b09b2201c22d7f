"""Compiles the Triton kernels for cards that are not here, as the engine launches them.

    PYTHONPATH=build/gpu-checks:. python -m benchmarks.gpu.compiled --cards 80,86,89,90,100,120

The launches are those of real steps: a model's weights are tensors without data (`meta`), and a recorder
takes each launch instead of a card. Each distinct kernel is then compiled to machine code, and the
assembler says how many registers it takes and spills. Exits with 1 when one needs more shared memory or
registers than a card has. `make gpu-checks` installs Triton and checks a part of this.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.provenance import write_result
from gammaray.bench.tables import plain_table
from services.engine.cuda.runner import Buffers, run_forward
from services.engine.cuda.tables import Buckets, new_tables
from services.engine.cuda.triton_kernels import TritonKernels
from services.engine.cuda.weights import GraphLayer, GraphModel, GraphShape

__all__ = [
    "CARDS",
    "MAX_REGISTERS",
    "SHAPES",
    "Compiled",
    "Launch",
    "compile_launch",
    "launches",
    "main",
    "meta_model",
    "recorded",
]

CARDS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one block may have, in bytes, by compute capability times ten."""

MAX_REGISTERS = 255
"""Of one thread, on all of these cards; what does not fit is spilled to memory."""

SHAPES = {
    "llama-3.2-1b": GraphShape(2048, 8192, 32, 8, 64, 64**-0.5, 1e-5, 128_256),
    "llama-3.1-8b": GraphShape(4096, 14_336, 32, 8, 128, 128**-0.5, 1e-5, 128_256),
    "llama-3.1-70b": GraphShape(8192, 28_672, 64, 8, 128, 128**-0.5, 1e-5, 128_256),
    "qwen2.5-7b": GraphShape(3584, 18_944, 28, 4, 128, 128**-0.5, 1e-6, 152_064),
    "qwen3-0.6b": GraphShape(1024, 3072, 16, 8, 128, 128**-0.5, 1e-6, 151_936),
}
"""Sizes of the models whose steps are compiled."""

ROWS = (1, 8, 17, 32, 40)
"""Rows of the steps: products of 17 to 32 have the largest tiles, those of more are the library's."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: what it was called with, and on what grid."""

    kernel: JITFunction[Any]
    grid: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """A kernel for one card.

    Attributes:
        kernel: Name of the kernel.
        card: Compute capability times ten.
        shape: The compile-time constants that differ between launches.
        shared_bytes: Shared memory of a block.
        registers: Of a thread.
        spilled_bytes: Of a thread.
    """

    kernel: str
    card: int
    shape: str
    shared_bytes: int
    registers: int
    spilled_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the card can launch it."""
        return self.shared_bytes <= CARDS[self.card] and self.registers <= MAX_REGISTERS


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the launches in the block instead of running them."""
    found: list[Launch] = []
    original = JITFunction.__getitem__

    def take(kernel: JITFunction[Any], grid: Any) -> Any:
        return lambda *args, **options: found.append(Launch(kernel, grid, args, options))

    JITFunction.__getitem__ = take
    try:
        yield found
    finally:
        JITFunction.__getitem__ = original


def meta_model(name: str, num_layers: int = 1, dtype: torch.dtype = torch.bfloat16) -> GraphModel:
    """Return the weights of a model of `SHAPES` without data."""
    shape = SHAPES[name]

    def weight(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    width = shape.num_heads * shape.head_dim
    layer = GraphLayer(
        attention_norm=weight(shape.hidden),
        qkv=weight(shape.num_qkv_heads * shape.head_dim, shape.hidden),
        qkv_bias=weight(shape.num_qkv_heads * shape.head_dim) if "qwen2" in name else None,
        out=weight(shape.hidden, width),
        out_bias=None,
        mlp_norm=weight(shape.hidden),
        gate_up=weight(2 * shape.intermediate, shape.hidden),
        down=weight(shape.hidden, shape.intermediate),
        head_norm=weight(2, shape.head_dim) if "qwen3" in name else None,
    )
    head = weight(shape.vocab_size, shape.hidden)
    rotation = torch.empty(2, 8192, shape.head_dim // 2, device="meta")
    return GraphModel(shape, (layer,) * num_layers, head, weight(shape.hidden), head, rotation)


def launches(name: str, shared_bytes: int, rows: Sequence[int] = ROWS) -> list[Launch]:
    """Return the launches of a model's steps with that many rows, draws included.

    Args:
        name: In `SHAPES`.
        shared_bytes: Shared memory of the card's blocks.
        rows: Rows of each step.
    """
    model = meta_model(name)
    shape, kernels = model.shape, TritonKernels(model, shared_bytes=shared_bytes)
    buckets = Buckets(shape.num_heads // shape.num_kv_heads, model.rotation.shape[1])
    with recorded() as found, torch.inference_mode():
        for count in rows:
            bucket = buckets.captured(count)
            tables = new_tables(bucket, model.device)
            buffers = Buffers.make(model, kernels, bucket)
            run_forward(model, kernels, tables, buffers)
            kernels.stripes(buffers.logits, tables, buffers.stripes)
            kernels.pick(buffers.stripes, buffers.tokens)
    return found


def compile_launch(launch: Launch, card: int) -> Compiled:
    """Compile a launch for a card.

    Raises:
        RuntimeError: The assembler refused the code.
    """
    driver.set_active(_Card(card))
    try:
        made = launch.kernel.run(*launch.args, grid=launch.grid, warmup=True, **launch.options)
    finally:
        driver._active = None  # found anew when it is asked for
    names = launch.kernel.arg_names
    constants = {key: value for key, value in launch.options.items() if key in names}
    registers, spilled = _assembled(made.asm["ptx"], card)
    return Compiled(
        kernel=launch.kernel.fn.__name__,
        card=card,
        shape=" ".join(f"{key}={value}" for key, value in constants.items()),
        shared_bytes=made.metadata.shared,
        registers=registers,
        spilled_bytes=spilled,
    )


class _Card:
    """What Triton asks of a driver before it launches; nothing is launched."""

    def __init__(self, card: int) -> None:
        self._card = card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._card, 32)

    def get_current_device(self) -> int:
        return self._card

    def get_current_stream(self, _device: int) -> int:
        return 0


def _assembled(code: str, card: int) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if card >= 100 else "ptxas")
    arch = f"sm_{card}{'a' if card >= 90 else ''}"
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(code)
        command = [str(program), "-v", "-arch", arch, str(source), "-o", f"{directory}/out"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = done.stderr + done.stdout
    registers, spilled = (
        re.search(r"Used (\d+) registers", said),
        re.search(r"(\d+) bytes spill stores", said),
    )
    if done.returncode or registers is None:
        raise RuntimeError(f"{program.name} for {arch}: {said[:500]}")
    return int(registers[1]), int(spilled[1]) if spilled else 0


def compile_all(names: Sequence[str], cards: Sequence[int], console: Console) -> list[Compiled]:
    """Compile each distinct launch of the models for the cards."""
    found: dict[Compiled, None] = {}
    for card in cards:
        for name in names:
            found |= dict.fromkeys(compile_launch(one, card) for one in launches(name, CARDS[card]))
            console.print(f"sm_{card}, {name}: {len(found)} kernels so far")
    return list(found)


def worst(found: Sequence[Compiled]) -> list[Compiled]:
    """Return by kernel and card the largest of each figure."""
    groups: dict[tuple[str, int], list[Compiled]] = {}
    for made in found:
        groups.setdefault((made.kernel, made.card), []).append(made)
    return [
        Compiled(
            kernel=kernel,
            card=card,
            shape=f"{len(group)} variants",
            shared_bytes=max(made.shared_bytes for made in group),
            registers=max(made.registers for made in group),
            spilled_bytes=max(made.spilled_bytes for made in group),
        )
        for (kernel, card), group in sorted(groups.items())
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Compile, print the table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cards", default=",".join(map(str, CARDS)), help="comma-separated; default: all")
    parser.add_argument("--models", default=",".join(SHAPES), help="comma-separated; default: all")
    parser.add_argument("--out", type=Path, help="new result file; default: in benchmarks/results")
    options = parser.parse_args(argv)
    console = Console(width=120)
    found = compile_all(options.models.split(","), [int(card) for card in options.cards.split(",")], console)
    headings = ("kernel", "card", "variants", "shared memory, largest", "of", "registers", "spilled bytes")
    table = plain_table("Kernels by card", headings)
    for made in worst(found):
        table.add_row(
            *(made.kernel, f"sm_{made.card}", made.shape.split()[0], str(made.shared_bytes)),
            *(str(CARDS[made.card]), str(made.registers), str(made.spilled_bytes)),
        )
    console.print(table)
    too_large = [made for made in found if not made.fits]
    for made in too_large:
        console.print(f"does not fit: {made}")
    result = {"triton": triton.__version__, "kernels": [asdict(made) for made in found]}
    print(f"written: {write_result('compiled', result, options.out)}")
    sys.exit(bool(too_large))


if __name__ == "__main__":
    main()
