"""The runs of other projects' clients: their pins, their tasks, and the check of likelihoods."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.clients.likelihoods import worst_difference
from benchmarks.clients.programs import CHECKS
from services.demo_pair import TARGET_DIR


@pytest.mark.slow
def test_likelihoods_are_compared_with_the_models_own():
    tokenizer = AutoTokenizer.from_pretrained(TARGET_DIR)
    model = AutoModelForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    context, continuation = "def add(left, right):", "\n    return left"
    whole = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    with torch.no_grad():
        log_probs = model(whole).logits[0].double().log_softmax(-1)
    own, greedy = 0.0, True
    for position in range(start, whole.shape[1]):
        own += log_probs[position - 1, whole[0, position]].item()
        greedy &= bool(log_probs[position - 1].argmax() == whole[0, position])
    assert worst_difference(TARGET_DIR, [(context, continuation, own, greedy)])[0] < 1e-4
    assert worst_difference(TARGET_DIR, [(context, continuation, own, greedy)])[1]
    difference, same = worst_difference(TARGET_DIR, [(context, continuation, own - 0.5, not greedy)])
    assert difference == pytest.approx(0.5, abs=1e-4)
    assert not same


def test_checks_report_each_failure_and_go_on(tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(
        """
from reporting import check, demand, report

@check
def fails(client, model):
    demand(model == "other", model)

@check
def raises(client, model):
    raise KeyError("gone")

@check
def passes(client, model):
    demand((client, model) == ("http://host:1/v1", "demo"), (client, model))

report(lambda address: address)
"""
    )
    command = [sys.executable, str(script), "host:1", "demo", str(tmp_path / "report.json")]
    subprocess.run(command, check=True, capture_output=True, timeout=60, env={"PYTHONPATH": str(CHECKS)})
    assert json.loads((tmp_path / "report.json").read_text()) == {
        "fails": "AssertionError: unexpected: 'demo'",
        "raises": "KeyError: 'gone'",
        "passes": None,
    }
