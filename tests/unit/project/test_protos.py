"""The generated code is that of the protos."""

import importlib.util
from pathlib import Path

import pytest

PROTOS = Path(__file__).parents[3] / "protos"


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate_protos", PROTOS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_copy(generator, monkeypatch, tmp_path):
    """Point the generator at a copy of the repository that has just been generated."""
    generator.generate(tmp_path)
    (tmp_path / generator.PACKAGE).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(generator, "ROOT", tmp_path)
    return tmp_path / generator.PACKAGE


def test_protos_changed_generated_file_is_stale(generator, fresh_copy):
    assert generator.check() == []
    with (fresh_copy / "types_pb2.py").open("a") as file:
        file.write("# edited\n")
    assert generator.check() == ["types_pb2.py"]


def test_protos_missing_and_left_over_files_are_stale(generator, fresh_copy):
    (fresh_copy / "types_pb2.pyi").unlink()
    (fresh_copy / "gone_service_pb2.py").touch()
    assert generator.check() == ["gone_service_pb2.py", "types_pb2.pyi"]
