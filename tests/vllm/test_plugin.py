"""The plug-in in vLLM itself: completions with speculation equal those of plain decoding.

Random float32 models, so that no two tokens are nearly equal in one batch and change places in another.
"""

import functools
import json
import random
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace

import gammaray_vllm
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.vllm.heads import complete_config
from tests.support import vllm_head_helpers as heads
from tests.support.adapter_helpers import make_adapter
from tests.support.processing_helpers import small_tokenizer

CHARACTERS = ("<eos>", "Ġ", "Ā", *map(chr, range(33, 127)))
"""Tokens; the model's configuration ends a text with the third one, too, which no document has."""

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy", "zzz"]}, "b": {"type": "boolean"}, "c": {"type": "null"}},
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
KINDS = {
    "plain": {},
    "filters": {"top_p": 0.9, "top_k": 20, "min_p": 0.02},
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "edits": {"logit_bias": {20: 3.0, 30: -100}, "min_tokens": 20, "stop_token_ids": [*range(10, 40)]},
    "words": {"bad_words": ["a", "b", "xy"], "allowed_token_ids": [*range(4, 90)], "min_p": 0.1},
    "schema": {"structured_outputs": SCHEMA},
    "logprobs": {"logprobs": 3},
    "choices": {"n": 3},
}
CASES = [(kind, temperature) for temperature in (0, 0.7, 1) for kind in KINDS]
MAX_TOKENS = 40
DISPATCHER = "vllm.triton_utils.dispatcher"
REBIND = "_rebind_kernels"  # a function of it
METHODS = ("ngram", "draft_model", "eagle3")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random model with a tokenizer of single characters."""
    folder = heads.random_target(tmp_path_factory.mktemp("target"))
    tokenizer = Tokenizer.from_str(small_tokenizer(CHARACTERS, (0,)))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    """Method -> the drafter's directory: the target with other weights, and a random head."""
    near = shutil.copytree(target, tmp_path_factory.mktemp("draft") / "near")
    weights = load_file(near / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight += torch.randn(weight.shape, generator=generator) * weight.std(correction=0) * 0.1
    save_file(weights, near / "model.safetensors", {"format": "pt"})
    return {"draft_model": near, "eagle3": heads.eagle3(tmp_path_factory.mktemp("head") / "head", target)}


@pytest.fixture(scope="module", autouse=True)
def plugged():
    """Turn the plug-in on, as vLLM does when it starts; yield what it logs."""
    from gammaray_vllm import hooks
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    records = []
    with pytest.MonkeyPatch.context() as patch:
        replaced = ((WorkerWrapperBase, "init_device"), (SamplingParams, "_validate_spec_decode"))
        for owner, name in replaced:
            patch.setattr(owner, name, getattr(owner, name))  # undone after the tests
        for name in (gammaray_vllm.VARIABLE, "VLLM_CPU_KVCACHE_SPACE"):
            patch.setenv(name, "1")
        for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING"):
            patch.setenv(name, "0")
        for level in ("warning", "error"):
            patch.setattr(hooks.logger, level, lambda text, *values: records.append(text % values))
        if find_spec(DISPATCHER):  # not in vLLM 0.24
            dispatcher = import_module(DISPATCHER)
            if not hasattr(getattr(dispatcher, REBIND), "__wrapped__"):
                setattr(dispatcher, REBIND, without_llvmlite(getattr(dispatcher, REBIND)))
        gammaray_vllm.register()
        yield records


def without_llvmlite(rebind):
    """Return a function of vLLM that fails on an object of llvmlite, without that package.

    The n-gram drafter imports it: no later engine of the process would start, those of other tests neither.
    """

    @functools.wraps(rebind)
    def rebind_others(overrides):
        names = [name for name in sys.modules if name.partition(".")[0] == "llvmlite"]
        hidden = {name: sys.modules.pop(name) for name in names}
        try:
            rebind(overrides)
        finally:
            sys.modules.update(hidden)

    return rebind_others


@contextmanager
def served(target, speculation=None, **options):
    from vllm import LLM

    settings = {"max_model_len": 320, "max_num_seqs": 4, "max_num_batched_tokens": 128, **options}
    llm = LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculation,
        structured_outputs_config={"disable_any_whitespace": True, "backend": "xgrammar"},
        **settings,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.renderer.shutdown()
        llm.llm_engine.engine_core.shutdown()
        grammars = llm.llm_engine.engine_core.engine_core.structured_output_manager
        for name in ("executor", "executor_for_fillmask"):
            if pool := getattr(grammars, name, None):
                pool.shutdown()


def speculation(method, count, drafters):
    options = {"method": method, "num_speculative_tokens": count}
    if method == "ngram":
        return {**options, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return {**options, "model": str(drafters[method])}


def requests():
    """Return prompts of 1 to 200 tokens, some longer than a chunk, and their parameters."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    rng, prompts, params = random.Random(4), [], []
    for at, (kind, temperature) in enumerate(CASES):
        given = dict(KINDS[kind])
        if "structured_outputs" in given:
            given["structured_outputs"] = StructuredOutputsParams(json=given["structured_outputs"])
        if temperature == 0:
            given.pop("n", None)
        length = rng.choice([1, 8, 60, 200])
        prompts.append({"prompt_token_ids": [rng.randrange(4, 90) for _ in range(length)]})
        params.append(SamplingParams(temperature=temperature, seed=at, max_tokens=MAX_TOKENS, **given))
    return prompts, params


def complete(llm, **options):
    """Return the tokens of each choice; and tokens, ranks and log-probabilities where they were asked for."""
    outputs = llm.generate(*requests(), use_tqdm=False, **options)
    tokens = [[tuple(choice.token_ids) for choice in output.outputs] for output in outputs]
    places = [place for output in outputs for place in output.outputs[0].logprobs or ()]
    ranks = [[(token, each.rank) for token, each in place.items()] for place in places]
    return tokens, ranks, [each.logprob for place in places for each in place.values()]


@pytest.fixture(scope="module")
def plain(target):
    with served(target) as llm:
        return complete(llm)


def test_plain_completions_obey_their_parameters(plain):
    for (kind, temperature), choices in zip(CASES, plain[0], strict=True):
        assert len(set(choices)) == (3 if kind == "choices" and temperature else 1)
        texts = ["".join(CHARACTERS[token] for token in choice).replace("Ġ", " ") for choice in choices]
        if kind == "schema":
            document, _ = json.JSONDecoder().raw_decode(texts[0])  # before the end of the text
            assert document["a"] in ("x", "yy", "zzz")
        if kind == "edits":
            assert len(choices[0]) > 20
            assert 30 not in choices[0]
        if kind == "words":
            assert not set(texts[0]) & {"a", "b"}
    assert len(plain[1]) >= MAX_TOKENS


@pytest.mark.parametrize(
    "count", [4, pytest.param(1, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("method", METHODS)
def test_completions_with_speculation_equal_the_plain_ones(method, count, target, drafters, plain, plugged):
    options = {"hf_overrides": complete_config} if method == "eagle3" else {}
    with served(target, speculation(method, count, drafters), **options) as llm:
        tokens, ranks, logprobs = complete(llm)
        counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    assert tokens == plain[0]
    assert ranks == plain[1]
    assert logprobs == pytest.approx(plain[2], abs=1e-4)
    accepted, drafted = (counted[f"vllm:spec_decode_num_{name}_tokens"] for name in ("accepted", "draft"))
    assert 0 < accepted < drafted
    assert "is ACTIVE" in plugged[-1]


@pytest.mark.nightly
def test_adapters_change_the_text_and_speculation_does_not(target, plain, tmp_path):
    from vllm.lora.request import LoRARequest

    make_adapter(tmp_path / "adapter", target, 1)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    found = []
    for drafting in (None, speculation("ngram", 4, {})):
        with served(target, drafting, enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
            found.append(complete(llm, lora_request=adapter)[0])
    assert found[0] == found[1] != plain[0]


def test_off_unless_the_variable_asks_and_then_nothing_is_imported():
    assert "gammaray_vllm:register" in [each.value for each in entry_points(group="vllm.general_plugins")]
    code = "import gammaray_vllm, sys; gammaray_vllm.register(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={}, check=True, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"gammaray", "grpc", "ray", "redis", "services", "torch", "vllm"}


@pytest.mark.parametrize(
    ("name", "wanted", "reason"),
    [
        ("", "", "builtins.object is not the V1 model runner"),
        ("GPUModelRunner._sample", "other", "has no other"),
        ("sample.sampler:Sampler", "other", "has no other"),
    ],
)
def test_a_vllm_that_differs_is_left_alone_with_one_line(name, wanted, reason, plugged, monkeypatch):
    from gammaray_vllm import hooks, needs
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    for names in (needs.NAMES, needs.SECOND_NAMES):
        for full in [full for full in names if name and full.endswith(name)]:
            monkeypatch.setitem(names, full, wanted)
            monkeypatch.setenv(gammaray_vllm.RUNNER_VARIABLE, str(int(names is needs.SECOND_NAMES)))
    monkeypatch.setattr(WorkerWrapperBase, "init_device", lambda self: None)
    hooks.differences.cache_clear()
    hooks.install()
    runner = object()
    WorkerWrapperBase.init_device(SimpleNamespace(worker=SimpleNamespace(model_runner=runner)))
    hooks.differences.cache_clear()
    assert "is NOT active" in plugged[-1]
    assert reason in plugged[-1]
