"""Engines that the tests share. Without vLLM, which has an environment of its own, nothing is collected."""

import importlib.util
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from services.engine.loader import load_engine
from services.own.target_scheduler import TargetScheduler
from services.scheduling.grammars import Grammars
from services.scheduling.planning import Limits
from tests.support.engine_helpers import tiny_model
from tests.support.processing_helpers import save_small_tokenizer

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Do not fail on warnings: vLLM and what it imports give many, of functions that torch will drop."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


EXPERT_GROUP = "_EP"  # a global of vLLM
IN_ANOTHER = "_run_in_subprocess"  # a function of vLLM
MAX_POSITIONS = 1024
BLOCK = 128
"""Tokens of a KV block of vLLM's CPU build."""

LIMITS = Limits(max_batch_tokens=256, prefill_chunk=64)
SIZES = {
    "llama": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32},
}
"""vLLM's kernels want heads of 32 or more."""


@contextmanager
def free_blocks(scheduler, count):
    """Leave vLLM that many KV blocks."""
    pool = scheduler.engine.pool
    taken = pool.get_new_blocks(scheduler.engine.num_free_blocks - count)
    try:
        yield
    finally:
        pool.free_blocks(taken)


def make_model(architecture: str, path: Path) -> Path:
    settings = {"max_position_embeddings": MAX_POSITIONS, **SIZES[architecture]}
    directory = tiny_model(architecture, path, gain=2.0, **settings)
    return save_small_tokenizer(directory)


def start_vllm(directory: Path, **options):
    from services.vllm.engine import EngineOptions, VllmEngine
    from services.vllm.scheduler import VllmScheduler

    settings = {
        "cache_budget_bytes": 64 << 20,
        "max_batch_tokens": LIMITS.max_batch_tokens,
        "prefill_chunk": LIMITS.prefill_chunk,
        "max_proposal": 8,
        **options,
    }
    engine = VllmEngine(EngineOptions(model=str(directory), **settings))
    return VllmScheduler(engine, LIMITS, Grammars(str(directory), engine.vocab_size))


@pytest.fixture(scope="session", autouse=True)
def in_one_process():
    """Keep vLLM's process groups when an engine ends: other engines of the run use them, too.

    And compile nothing, as torch's threads for it never end; and look at models' classes in this process: on
    a new machine vLLM starts another for each class, which takes 20 s.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"vllm.model_executor.models.registry.{IN_ANOTHER}", lambda look: look())
        patch.setattr("torch._dynamo.config.disable", True)
        patch.setattr("vllm.v1.engine.core.enable_envs_cache", lambda: None)  # they differ between engines
        patch.setattr("vllm.v1.engine.core.cleanup_dist_env_and_memory", lambda: None)
        yield


def own_variables():
    """Undo what engines set in the environment, which is a process's: one with two ranks, for example."""
    with mock.patch.dict(os.environ):
        yield


variables_of_module = pytest.fixture(scope="module", autouse=True)(own_variables)
variables_of_test = pytest.fixture(autouse=True)(own_variables)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return make_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def shared(llama):
    """vLLM's scheduler for the Llama, for the whole run."""
    scheduler = start_vllm(llama)
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="session")
def moe(tmp_path_factory):
    return make_model("qwen3_moe", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def shared_moe(moe, shared):
    """vLLM's scheduler for a Qwen3 with experts; it ends before the other one: they share vLLM's globals."""
    from vllm.distributed import parallel_state

    # The first engine of the process has none; of one rank all groups are alike.
    setattr(parallel_state, EXPERT_GROUP, parallel_state.get_tp_group())
    scheduler = start_vllm(moe)
    yield scheduler
    scheduler.close()


@pytest.fixture
def scheduler(shared):
    """The same, without sessions before and after a test."""
    yield shared
    shared.step()
    shared.release([(name, 0, True) for name in list(shared.queue.sessions)])
    shared.step()
    assert shared.queue.is_idle


@pytest.fixture(scope="session")
def reference(llama):
    """The CPU engine with the same model."""
    engine = load_engine(str(llama))
    scheduler = TargetScheduler(engine, LIMITS, Grammars(str(llama), engine.vocab_size))
    yield scheduler
    scheduler.close()
