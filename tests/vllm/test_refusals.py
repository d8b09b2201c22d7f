"""What vLLM refuses at start becomes one short line and exit code 2."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gammaray.config import TargetSettings
from gammaray.errors import InvalidArgumentError
from services.demo_pair import TARGET_DIR
from services.vllm.engine import EngineOptions, VllmEngine
from services.vllm.loading import load_target
from tests.support.engine_helpers import tiny_model
from tests.support.processing_helpers import save_small_tokenizer
from tests.vllm.conftest import LIMITS

MOST = 400
"""Characters of the line, a path among them."""


@pytest.fixture
def demo(tmp_path):
    return Path(shutil.copytree(TARGET_DIR, tmp_path / "model"))


def test_architecture_that_vllm_lacks(demo):
    config = json.loads((demo / "config.json").read_text())
    config |= {"model_type": "mamba9", "architectures": ["Mamba9ForCausalLM"]}
    (demo / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgumentError, match=r"allowed: a model that vLLM 0\.32 loads: ") as refused:
        VllmEngine(EngineOptions(str(demo)))
    assert (refused.value.field, refused.value.got) == ("model", str(demo))
    assert "mamba9" in refused.value.allowed
    assert len(str(refused.value)) <= MOST
    assert "\n" not in str(refused.value)


def test_recurrent_layers_which_this_build_does_not_compute(tmp_path):
    directory = save_small_tokenizer(tiny_model("qwen3_next", tmp_path, max_position_embeddings=1024))
    with pytest.raises(InvalidArgumentError, match="model without recurrent layers: vLLM's CPU build"):
        VllmEngine(EngineOptions(str(directory)))


@pytest.mark.nightly
def test_too_little_memory_for_the_cache(demo):
    """The worker says it in one line, beside what libraries write."""
    command = [sys.executable, "-m", "services.target_worker", "--engine", "vllm", "--model", str(demo)]
    command += ["--cache-budget-mb", "1", "--dtype", "float32"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    (line,) = [
        line for line in ended.stderr.splitlines() if line.startswith("python -m services.target_worker: ")
    ]
    assert len(line) <= MOST
    assert "cache_budget_mb: got 1, allowed: enough for one session: " in line


def test_device_that_this_build_lacks(demo):
    words = r"device: got cuda, allowed: auto or cpu: the installed vLLM 0\.32\."
    with pytest.raises(InvalidArgumentError, match=words):
        load_target(str(demo), TargetSettings(engine="vllm", device="cuda"), LIMITS)
