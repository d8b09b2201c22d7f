"""What a captured step enqueues, on tensors without data: no wait for the host, and no tensor there."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from tests.support.torch_helpers import TorchOperations

if find_spec("triton") is None:
    pytest.skip("Triton is not installed; to enable: make gpu-checks", allow_module_level=True)

from benchmarks.gpu.compiled import Launch, meta_model, recorded
from services.engine.core.batch import GumbelDraw
from services.engine.cuda.runner import GraphRunner
from services.engine.cuda.tables import MAX_CAPTURED_ROWS, Bucket
from services.engine.cuda.triton_kernels import TritonKernels
from services.engine.engine import SequenceInput
from services.engine.graph_engine import GraphEngine

NUM_LAYERS = 3
PER_LAYER = 9
"""Launches: two norms, four products, rotation, attention and its combination."""

BESIDE = 12
"""Launches of a step beside its layers, draws included, whatever the number of sessions."""

MAX_VARIANTS = 24
"""Kernels that a worker compiles before it is ready; Triton keeps them for the next start."""

MAX_GRAPHS = 32
"""Steps that a worker captures before it is ready."""


@contextmanager
def watched():
    """Yield the recorded launches of kernels and the operations of torch in the block."""
    with recorded() as kernels, TorchOperations() as torch_side:
        yield kernels, torch_side


def num_launches(kernels, torch_side) -> int:
    return len(kernels) + torch_side.launches(on_device=True).total()


def new_runner(num_layers: int = NUM_LAYERS) -> GraphRunner:
    model = meta_model("llama-3.2-1b", num_layers)
    return GraphRunner(model, TritonKernels(model))


def step_launches(rows: int) -> int:
    runner = new_runner()
    with torch.inference_mode():
        program = runner.program(runner.buckets.captured(rows))
        with watched() as (kernels, torch_side):
            program.capture.run()
    assert torch_side.on_host == []
    return num_launches(kernels, torch_side)


def test_steps_do_not_wait_and_launches_do_not_grow_with_sessions():
    found = {rows: step_launches(rows) for rows in (1, 8, 32)}
    assert len(set(found.values())) == 1
    assert found[1] - PER_LAYER * NUM_LAYERS <= BESIDE


def variant(launch: Launch) -> tuple[object, ...]:
    """Return what Triton compiles a kernel for: constants, types, and which arguments it specialises on."""
    key: list[object] = [launch.kernel.fn.__name__, sorted(launch.options.items())]
    for param, value in zip(launch.kernel.params, launch.args, strict=False):
        if isinstance(value, torch.Tensor):
            # An allocation is aligned, a view is as far as it begins at a multiple.
            key.append((value.dtype, value.storage_offset() * value.element_size() % 16 == 0))
        elif isinstance(value, int) and not param.do_not_specialize:
            key.append((value == 1, value % 16 == 0))
    return tuple(map(str, key))


def variants(runner: GraphRunner, bucket: Bucket) -> set[tuple[object, ...]]:
    with torch.inference_mode(), recorded() as kernels:
        runner.program(bucket).capture.run()
    return {variant(one) for one in kernels}


def test_all_steps_are_captured_before_a_worker_is_ready():
    """Few graphs and kernels cover every step of up to MAX_CAPTURED_ROWS rows."""
    runner = new_runner(1)
    buckets = runner.buckets
    assert len(buckets.all()) <= MAX_GRAPHS
    compiled = set().union(*(variants(runner, bucket) for bucket in buckets.all()))
    assert len(compiled) <= MAX_VARIANTS
    assert len(runner.programs) == len(buckets.all())
    for rows in range(1, MAX_CAPTURED_ROWS + 1):
        runner.program(buckets.captured(rows))
    assert len(runner.programs) == len(buckets.all())


def test_steps_that_are_not_captured_launch_only_what_the_warm_up_compiled():
    """Their sizes are their own: a kernel that was compiled for each would stop all sessions for seconds."""
    runner = new_runner(1)
    compiled = set().union(*(variants(runner, bucket) for bucket in runner.buckets.all()))
    for rows, wanted, words, tiles in (
        (321, 1, 1, 41),
        (777, 777, 2, 99),
        (640, 33, 3, 80),
        (1000, 31, 1, 200),
    ):
        bucket = Bucket(rows, wanted, words, tiles, 7, 9000, is_captured=False)
        assert variants(runner, bucket) <= compiled, bucket
    # The check sees a variant that was not compiled.
    runner.kernels.max_rows = 64
    assert not variants(runner, Bucket(64, 64, 1, 8, 7, 9000, is_captured=False)) <= compiled


def draft_launches(count: int, sessions: int) -> int:
    model = meta_model("llama-3.2-1b", NUM_LAYERS)
    made = GraphEngine.of(model, name="meta", kernels=TritonKernels(model))
    made.runner.program(made.runner.buckets.captured(sessions))
    feeds = [SequenceInput(f"s{number}", 0, [1], 1) for number in range(sessions)]
    with watched() as (kernels, torch_side), pytest.raises(NotImplementedError, match="meta"):
        # The copy back to the host, after all steps, is what fails here.
        made.draft(feeds, [GumbelDraw(5)] * sessions, count, num_guesses=6)
    assert sum(one.kernel.fn.__name__ == "split_kernel" for one in kernels) == count * NUM_LAYERS
    return num_launches(kernels, torch_side)


def test_drafts_take_a_bounded_number_of_launches_per_token():
    found = {count: draft_launches(count, 4) for count in (1, 2, 3, 5)}
    per_token = found[3] - found[2]
    assert found[5] - found[2] == 3 * per_token
    # Six of these and the layers are one replay.
    assert per_token - PER_LAYER * NUM_LAYERS <= 14
    assert found[1] - PER_LAYER * NUM_LAYERS <= 30
    assert draft_launches(5, 16) == found[5]


def test_a_wait_for_the_host_is_found():
    with pytest.raises(RuntimeError, match="meta"), watched():
        torch.zeros(3, device="meta").sum().item()


def test_a_tensor_of_the_host_is_found():
    with watched() as (_, torch_side):
        torch.zeros(3, device="meta") + torch.tensor(2.0)
    assert torch_side.on_host


def test_a_launch_per_session_is_found(monkeypatch):
    """As one that an operation made for each session apart would be."""
    original = TritonKernels.rotate

    def rotate(self, qkv, layer, head_norm, tables):
        for _ in range(len(tables.count)):
            original(self, qkv, layer, head_norm, tables)

    monkeypatch.setattr(TritonKernels, "rotate", rotate)
    assert step_launches(1) != step_launches(8)
