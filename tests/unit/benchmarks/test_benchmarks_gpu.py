"""The comparison on a GPU: what is missing on this machine; a vLLM compared without running it."""

import argparse
import subprocess
import sys

from benchmarks.gpu.needs import MISSING, distributions, models
from benchmarks.vllm_hooks import Source
from services.vllm.plugin import needs


def test_missing_packages_are_named_with_their_wheels_and_models_with_their_files(tmp_path):
    (tmp_path / "vllm-0.24.0-cp38-abi3-manylinux_2_28_x86_64.whl").touch()
    given = argparse.Namespace(tiny=False, wheels=tmp_path, target=str(tmp_path), draft="", head="")
    found = {finding.name: finding for finding in (*distributions(given), *models(given))}
    assert found["packages"].state == MISSING
    assert found["packages"].text.endswith(f"; no wheel in {tmp_path}: gammaray-vllm")
    assert f"--no-index --find-links {tmp_path}" in found["to install"].text
    assert found["target"].state == MISSING


def test_the_check_needs_the_standard_library_alone():
    code = "import benchmarks.gpu.__main__, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"gammaray", "httpx", "torch", "transformers", "vllm"} & set(done.stdout.split())


def test_a_vllm_is_compared_as_text(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "one.py").write_text("def f(a, b, c=1):\n    return a.x\n")
    (tmp_path / "vllm" / "two.py").write_text("from vllm.one import f\nclass C:\n    def g(self): return f\n")
    monkeypatch.setattr(needs, "PARAMETERS", {"vllm.two:f": "a b c", "vllm.two:C.g": "self other"})
    monkeypatch.setattr(needs, "CALLED", {"vllm.one:f": ("a b",), "vllm.one:h": ("",)})
    monkeypatch.setattr(needs, "NAMES", {"vllm.two:C": "f x"})
    found = [line.partition(":")[2] for line in needs.differences(False, Source(tmp_path).look)]
    assert found == ["C.g has self", "h is missing (no h in vllm.one)", "C has no x"]
