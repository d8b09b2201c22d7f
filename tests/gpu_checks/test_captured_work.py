"""What a captured step enqueues, on tensors without data: no wait for the host, and no tensor there."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch
from torch_helpers import TorchOperations

if find_spec("triton") is None:
    pytest.skip("Triton is not installed; to enable: make gpu-checks", allow_module_level=True)

from benchmarks.gpu.compiled import Launch, meta_model, recorded
from services.engine.core.batch import GumbelDraw
from services.engine.cuda.runner import Capture, GraphRunner
from services.engine.cuda.tables import Bucket
from services.engine.cuda.triton_kernels import TritonKernels
from services.engine.device_drafting import GraphEngine, TreeShape
from services.engine.engine import SequenceInput

NUM_LAYERS = 3
PER_LAYER = 9
"""Launches: two norms, four products, rotation, attention and its combination."""

BESIDE = 12
"""Launches of a step beside its layers, draws included, whatever the number of sessions."""

MAX_VARIANTS = 24
"""Kernels that a worker compiles before it is ready; Triton keeps them for the next start."""

BESIDE_LEVEL = 30
"""Of a level of a tree, whose nodes are chosen from those of all parents."""


@contextmanager
def watched():
    """Yield the recorded launches of kernels and the operations of torch in the block."""
    with recorded() as kernels, TorchOperations() as torch_side:
        yield kernels, torch_side


def num_launches(kernels, torch_side) -> int:
    return len(kernels) + torch_side.launches().total()


def step_launches(bucket: Bucket, *, draws: bool) -> int:
    model = meta_model("llama-3.2-1b", NUM_LAYERS)
    runner = GraphRunner(model, TritonKernels(model))
    with torch.inference_mode():
        program = runner.program(bucket, draws=draws, tapped=())
        with watched() as (kernels, torch_side):
            program.capture.run()
    assert torch_side.on_host == []
    return num_launches(kernels, torch_side)


@pytest.mark.parametrize("draws", [False, True])
def test_steps_do_not_wait_and_launches_do_not_grow_with_sessions(draws):
    found = {
        sessions: step_launches(Bucket(sessions, sessions, sessions, 1, 1, 2048), draws=draws)
        for sessions in (1, 8, 32)
    }
    assert len(set(found.values())) == 1
    assert found[1] - PER_LAYER * NUM_LAYERS <= BESIDE
    assert step_launches(Bucket(8, 24, 24, 1, 4, 8192), draws=draws) == found[1]


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


def variants(runner: GraphRunner, bucket: Bucket, *, draws: bool) -> set[tuple[object, ...]]:
    with torch.inference_mode(), recorded() as kernels:
        runner.program(bucket, draws=draws, tapped=()).capture.run()
    return {variant(one) for one in kernels}


def test_steps_launch_only_what_the_warm_up_compiled():
    model = meta_model("llama-3.2-1b")
    runner = GraphRunner(model, TritonKernels(model))
    compiled = set().union(*(variants(runner, bucket, draws=True) for bucket in runner.warm_buckets()))
    assert len(compiled) <= MAX_VARIANTS
    for sessions, per_session in itertools.product((1, 2, 3, 8, 32), (1, 2, 5, 9, 33)):
        rows = sessions * per_session
        for wanted, max_slots in itertools.product((0, sessions, rows), (2048, 8192)):
            bucket = Bucket(sessions, rows, wanted, 1, per_session, max_slots)
            assert variants(runner, bucket, draws=wanted > 0) <= compiled, bucket
    # The check sees a variant that was not compiled: a row's mask of two words.
    assert not variants(runner, Bucket(1, 70, 70, 2, 70, 2048), draws=True) <= compiled


def engine() -> GraphEngine:
    model = meta_model("llama-3.2-1b", NUM_LAYERS)
    return GraphEngine.of(model, name="meta", kernels=TritonKernels(model))


def proposal_launches(shape: int | TreeShape, sessions: int) -> int:
    made = engine()
    feeds = [SequenceInput(f"s{number}", 0, [1, 2], 1) for number in range(sessions)]
    draws = [GumbelDraw(5)] * sessions
    with recorded(), pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        # The copy back to the host, after the captured work, is what fails here.
        made.draft_chains(feeds, draws, shape) if isinstance(shape, int) else made.draft_trees(
            feeds, draws, shape
        )
    work = made.runner.last
    assert isinstance(work, Capture)
    with torch.inference_mode(), watched() as (kernels, torch_side):
        work.run()
    assert torch_side.on_host == []
    assert sum(one.kernel.fn.__name__ == "norm_kernel" for one in kernels) >= 2 * NUM_LAYERS
    return num_launches(kernels, torch_side)


def test_chains_take_a_bounded_number_of_launches_per_token():
    found = {gamma: proposal_launches(gamma, 4) for gamma in (1, 2, 5)}
    per_token = found[2] - found[1]
    assert found[5] - found[1] == 4 * per_token
    assert per_token - PER_LAYER * NUM_LAYERS <= BESIDE
    assert found[1] - PER_LAYER * NUM_LAYERS <= 2 * BESIDE
    assert proposal_launches(5, 16) == found[5]


def test_trees_take_a_bounded_number_of_launches_per_level():
    shallow, deep = (proposal_launches(TreeShape(4, depth), 4) for depth in (2, 5))
    assert (deep - shallow) / 3 - PER_LAYER * NUM_LAYERS <= BESIDE_LEVEL
    assert proposal_launches(TreeShape(4, 5), 8) == deep


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
    found = [step_launches(Bucket(number, number, number, 1, 1, 2048), draws=True) for number in (1, 8)]
    assert found[0] != found[1]
