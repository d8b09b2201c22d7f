"""The kernel's bits: whatever rows come with a row, on any number of threads, for one caller or several."""

from concurrent.futures import ThreadPoolExecutor
from ctypes import byref
from typing import Any

import pytest
import torch
from torch import Tensor

from gammaray.config import TargetSettings
from gammaray.demo_pair import resolve_model
from services.engine.core.batch import SequenceInput
from services.engine.core.quantised import quantise
from services.engine.engine import Engine
from services.engine.hf.runner import TransformersRunner
from services.engine.loader import load_engine
from services.engine.native import weights
from services.engine.native.build import AMX, BF16
from services.engine.native.library import kernel_threads, open_kernel, usable_variants, use_threads
from services.engine.native.weights import Packer
from services.own.head_loading import load_local_drafter
from tests.support.engine_helpers import random_tokens, tiny_model
from tests.support.own_process import run_code


@pytest.fixture(autouse=True)
def one_thread_afterwards():
    yield
    use_threads(1)


def logits(engine: Engine) -> list[Tensor]:
    """The logits of prefills, single rows, a chain and a tree, then of a chain in one call."""
    texts = {session: random_tokens(150, seed, 2048) for seed, session in enumerate("ab")}
    made = []
    for feeds in (
        [SequenceInput("a", 0, texts["a"], 3), SequenceInput("b", 0, texts["b"][:63], 1)],
        [SequenceInput("a", 150, [5], 1), SequenceInput("b", 63, texts["b"][63:72], 9)],
        [SequenceInput("a", 151, [5, 6, 7, 8, 9, 5, 6], 7, (-1, -1, 0, 0, 1, 2))],
    ):
        made += engine.step(feeds)
    made.append(engine.chain(SequenceInput("c", 0, [5] * 6, 6))[1])
    for session in "abc":
        engine.release(session)
    return made


@pytest.mark.parametrize("variant", usable_variants())
def test_bits_do_not_depend_on_the_number_of_threads(variant, monkeypatch):
    monkeypatch.setattr(weights, "load_kernel", lambda *_: open_kernel(variant))
    engine = load_engine(resolve_model("demo", "draft"))
    alone = logits(engine)
    for count in (2, 5, 3, 1):
        use_threads(count)
        torch.testing.assert_close(logits(engine), alone, rtol=0, atol=0)


def test_callers_at_the_same_time_get_their_own_results(tmp_path):
    """A caller computes alone during the task of another caller; each gets the results of its own input."""
    engines = [load_engine(str(tiny_model("qwen3", tmp_path / str(n), seed=n))) for n in range(3)]

    def steps(engine: Engine) -> list[Tensor]:
        made = []
        for turn in range(60):
            made += engine.step([SequenceInput("a", 0, random_tokens(20 + turn % 7, turn), 20)])
            engine.release("a")
        return made

    alone = [steps(engine) for engine in engines]
    use_threads(3)
    with ThreadPoolExecutor(3) as threads:
        for made, expected in zip(threads.map(steps, engines), alone, strict=True):
            torch.testing.assert_close(made, expected, rtol=0, atol=0)


_USES_THREADS = """
import sys, time
import psutil
from services.engine.core.batch import SequenceInput
from services.engine.loader import load_engine

def cpu_times():
    return {thread.id: thread.user_time for thread in psutil.Process().threads()}

engine = load_engine(sys.argv[1], threads=4)  # its checks compute, too: the pool's threads are started
feed = SequenceInput("a", 0, list(range(60)), 60)
for pause in (0.0, 0.2):  # the second one is longer than a thread spins
    time.sleep(pause)
    before, deadline, used = cpu_times(), time.monotonic() + 60, set()
    while len(used) < 4 and time.monotonic() < deadline:
        engine.release("a")
        engine.step([feed])
        used |= {thread for thread, taken in cpu_times().items() if taken > before[thread]}
    print(len(used))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_as_many_threads_compute_and_are_woken_after_a_pause(tmp_path):
    """In a process without other busy threads."""
    directory = str(tiny_model("llama", tmp_path))
    assert run_code(_USES_THREADS, directory).stdout.split() == ["4", "4"]


def test_target_that_torch_computes_keeps_its_threads_beside_a_draft_model(tmp_path):
    target, draft = (str(tiny_model(arch, tmp_path)) for arch in ("gpt2", "llama"))
    settings = TargetSettings(model=target, head=draft, threads=2)
    engine = load_engine(target, threads=2)
    assert isinstance(engine.runner, TransformersRunner)
    load_local_drafter(settings, engine)
    assert (kernel_threads(), torch.get_num_threads()) == (2, 2)


OUTPUTS = 97
"""No whole number of panels on any instruction set."""

MOST_ROWS = 60
"""More than two groups of rows."""


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(size[-1]))


def packed(library: Any, kind: str, inputs: int, kept: list[object]) -> tuple[Any, Tensor]:
    """Return a matrix with biases for the kernel, and the weights and biases that it stands for."""
    weight, bias = random(OUTPUTS, inputs) * 0.1, random(OUTPUTS)
    if kind in ("bfloat16", "pairs"):
        weight = weight.bfloat16().float()
    quantised = {}
    if kind == "int8":
        quantised[weight.data_ptr()] = quantise(weight)
    dtype = torch.bfloat16 if kind == "pairs" else torch.float32
    matrix = Packer(library, kept, quantised, dtype).matrix([(weight, bias)])
    exact = quantised[weight.data_ptr()].dequantised() if quantised else weight
    return matrix, torch.cat((exact, bias[:, None]), 1)


def mapped(library: Any, matrix: Any, rows: Tensor, threads: int) -> Tensor:
    """Return the products of some rows, and one row more, which is left as NaN."""
    made = torch.full((len(rows) + 1, OUTPUTS), torch.nan)
    scratch = torch.full((library.gr_map_scratch_size(byref(matrix), len(rows)),), torch.nan)
    places = rows.data_ptr(), made.data_ptr(), scratch.data_ptr()
    library.gr_map(byref(matrix), len(rows), *places, threads)
    return made


KINDS = [
    *((variant, kind) for variant in usable_variants() for kind in ("float32", "bfloat16", "int8")),
    *((variant, "pairs") for variant in usable_variants() if variant in (BF16, AMX)),
]


# Below one block of inputs, exactly one, a little more, whole tiles of AMX, and several blocks with a rest.
# 45 and 303 leave one and three inputs beyond a panel's cache lines.
@pytest.mark.parametrize(("variant", "kind"), KINDS)
@pytest.mark.parametrize("inputs", [45, 96, 100, 128, 303])
def test_products_do_not_depend_on_the_other_rows_or_the_number_of_threads(variant, kind, inputs):
    """More threads than panels, and panels that do not divide evenly."""
    library = open_kernel(variant).library
    kept: list[object] = []
    matrix, exact = packed(library, kind, inputs, kept)

    def product(rows: Tensor, threads: int = 1) -> Tensor:
        made = mapped(library, matrix, rows, threads)
        assert made[-1].isnan().all()  # nothing is written behind the last row
        return made[:-1]

    rows = random(MOST_ROWS, inputs)
    alone = torch.cat([product(row[None].contiguous()) for row in rows])
    entering = rows.bfloat16() if kind == "pairs" else rows
    expected = torch.cat((entering, torch.ones(MOST_ROWS, 1)), 1).double() @ exact.double().T
    # Half a step of the inputs where they become integers, see integers.h.
    rounded = exact.abs().sum(1).max() * rows.abs().max() / 65534 if kind == "int8" else 0.0
    assert torch.allclose(alone.double(), expected, atol=(1e-5 if kind == "pairs" else 1e-4) + float(rounded))
    for count in range(2, MOST_ROWS + 1):
        assert torch.equal(product(rows[:count].contiguous()), alone[:count])
    for threads in range(2, 21):
        assert torch.equal(product(rows[:7].contiguous(), threads), alone[:7])
