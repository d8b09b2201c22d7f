"""Model identity depends on weights, configuration and arithmetic, and nothing else."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.process.fingerprints import NUM_WINDOWS, WHOLE_BYTES, WINDOW_BYTES, model_identity

ROWS, WIDTH = 512, 64  # 128 KiB of float32: above what is read whole


@pytest.fixture
def model(tmp_path):
    assert max(WHOLE_BYTES, NUM_WINDOWS * WINDOW_BYTES) < ROWS * WIDTH * 4
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "rope_theta": 1e4, "transformers_version": "5.17", "_name_or_path": "x"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "large.weight": torch.randn(ROWS, WIDTH, generator=generator),
        "norm.weight": torch.randn(WIDTH, generator=generator),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def identity(folder, dtype="float32", device="cpu", deterministic=False):
    return model_identity(str(folder), dtype=dtype, device=device, deterministic=deterministic)


def rewrite(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def test_identity_of_a_copy_is_the_same(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "elsewhere")
    assert identity(copy) == identity(model)
    digest, how = identity(model).split("/")
    assert (len(digest), how) == (64, "float32")


def test_identity_does_not_depend_on_shards_or_configuration_metadata(model):
    before = identity(model)
    reconfigure(model, transformers_version="5.23", _name_or_path="y", dtype="float32")
    assert identity(model) == before
    tensors = load_file(model / "model.safetensors")
    where = {name: f"model-{number}.safetensors" for number, name in enumerate(sorted(tensors, reverse=True))}
    for name, file in where.items():
        save_file({name: tensors[name]}, model / file, metadata={"format": "pt"})
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert identity(model) == before


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: t["large.weight"].mul_(1.001), id="scaled"),
        pytest.param(lambda t: t["large.weight"][0, 0].add_(1), id="first"),
        pytest.param(lambda t: t["large.weight"][-1, -1].add_(1), id="last"),
        pytest.param(lambda t: t["norm.weight"][WIDTH // 2].add_(1e-6), id="one-of-a-small-tensor"),
        pytest.param(lambda t: t.update({"large.weight": t["large.weight"].T.contiguous()}), id="shape"),
        pytest.param(lambda t: t.update({"more": torch.zeros(1)}), id="one-more"),
        pytest.param(lambda t: t.update({"other": t.pop("norm.weight")}), id="name"),
    ],
)
def test_identity_of_other_weights_differs(model, change):
    before = identity(model)
    rewrite(model, change)
    assert identity(model) != before


def test_identity_misses_one_weight_between_the_samples_of_a_large_tensor(model):
    """A documented limitation: reading all weights at startup would take minutes."""
    before = identity(model)
    rewrite(model, lambda t: t["large.weight"].view(-1)[WINDOW_BYTES // 4 + 1].add_(1))
    assert identity(model) == before


def test_identity_of_another_configuration_or_arithmetic_differs(model):
    ways = {
        identity(model),
        identity(model, dtype="bfloat16"),
        identity(model, deterministic=True),
        identity(model, deterministic=True, device="cuda"),
    }
    assert len(ways) == 4
    assert identity(model, device="cuda") == identity(model), "kernels differ by rounding, as batches do"
    reconfigure(model, rope_theta=5e5)
    assert identity(model) not in ways


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda folder: (folder / "model.safetensors").unlink(), id="no-weights"),
        pytest.param(lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99), id="no-header"),
        pytest.param(lambda folder: (folder / "model.safetensors").write_bytes(b"x"), id="too-short"),
        pytest.param(lambda folder: (folder / "config.json").write_text("{"), id="configuration"),
        pytest.param(shutil.rmtree, id="nothing"),
    ],
)
def test_identity_of_unreadable_weights_is_empty_and_logged(model, spoil, caplog):
    spoil(model)
    assert identity(model) == ""
    assert "has no model identity" in caplog.text


def test_identity_of_pickled_weights(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    before = identity(model)
    data = bytearray((model / "pytorch_model.bin").read_bytes())
    data[-1] ^= 1
    (model / "pytorch_model.bin").write_bytes(data)
    assert before
    assert identity(model) != before
