"""The Triton kernels in Triton's interpreter, against the same operations in plain torch.

Runs wherever Triton is installed, without a GPU; the compiled kernels are checked by `benchmarks.gpu`.
Triton decides at its import whether to interpret, so the checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_helpers import random_tokens, tiny_model

from services.engine.core.batch import GREEDY, GumbelDraw
from services.engine.core.model import load_model
from services.engine.cuda.torch_kernels import Stripes, TorchKernels
from services.engine.device_drafting import GraphEngine, TreeShape
from services.engine.engine import SequenceInput

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
NO_TRITON = "Triton is not installed; to enable: .venv/bin/pip install triton"
HAS_TRITON = find_spec("triton") is not None
interpreted = pytest.mark.skipif(
    not INTERPRETS, reason="the first test runs it in Triton's interpreter" if HAS_TRITON else NO_TRITON
)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
GUMBEL_DRAWS = (GumbelDraw(2**63 + 11), GREEDY)
TOLERANCE = 1e-4


@pytest.mark.skipif(INTERPRETS or not HAS_TRITON, reason=NO_TRITON)
def test_kernels_pass_their_checks_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "8 passed" in done.stdout


@pytest.fixture
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[GraphEngine, GraphEngine]]:
    """The same weights on Triton's kernels and on torch's."""
    from services.engine.cuda.triton_kernels import TritonKernels

    directory = tiny_model(request.param, tmp_path, max_position_embeddings=512, **SMALL)
    plain = GraphEngine.build(load_model(str(directory), device="cpu"))
    model = plain.runner.model
    with warnings.catch_warnings():
        # numpy warns about infinities under masks.
        warnings.simplefilter("ignore")
        yield GraphEngine.of(model, name="triton", kernels=TritonKernels(model)), plain


def worst(engines: tuple[GraphEngine, GraphEngine], *feeds: SequenceInput) -> float:
    """Largest difference of a logit in one step of both engines."""
    one, other = (torch.cat(engine.step(feeds)) for engine in engines)
    return (one - other).abs().max().item() if one.numel() else 0.0


@interpreted
@pytest.mark.parametrize("engines", ["qwen2", "qwen3"], indirect=True)
def test_ragged_steps_and_trees_match_torch(engines: tuple[GraphEngine, GraphEngine]) -> None:
    """Biases (Qwen2), norms of heads (Qwen3), several splits of the cache, rollback, trees, more sessions."""
    text = random_tokens(258, 1)
    found = [worst(engines, SequenceInput("a", 0, text, 1), SequenceInput("b", 0, text[:3], 1))]
    found.append(worst(engines, SequenceInput("a", 256, text[:3], 3), SequenceInput("b", 3, text[5:6], 1)))
    tree = (-1, 0, -2, 0)
    found.append(
        worst(engines, SequenceInput("c", 0, text[:2], 0), SequenceInput("a", 254, text[:6], 5, tree))
    )
    for engine in engines:
        engine.keep_path("a", 256, [0, 3])
    found.append(worst(engines, SequenceInput("a", 258, text[:1], 1)))
    assert max(found) <= TOLERANCE


@interpreted
@pytest.mark.parametrize("engines", ["llama"], indirect=True)
def test_proposals_match_torch(engines: tuple[GraphEngine, GraphEngine]) -> None:
    text = random_tokens(9, 2)
    feeds = [SequenceInput("a", 0, text, 1), SequenceInput("b", 0, text[:4], 1)]
    chains = [engine.draft_chains(feeds, GUMBEL_DRAWS, 3) for engine in engines]
    assert chains[0] == chains[1]
    again = [SequenceInput("a", 9, [5], 1), SequenceInput("b", 3, text[3:5], 1)]
    trees = [engine.draft_trees(again, GUMBEL_DRAWS, TreeShape(2, 3)) for engine in engines]
    assert trees[0] == trees[1]


@interpreted
@pytest.mark.parametrize("engines", ["llama"], indirect=True)
def test_product_rows_do_not_depend_on_other_rows(engines: tuple[GraphEngine, GraphEngine]) -> None:
    """A chain's logits are, bit for bit, those of decoding it token by token."""
    engine, text = engines[0], random_tokens(7, 3)
    alone = [engine.step([SequenceInput("a", i, text[i : i + 1], 1)])[0] for i in range(7)]
    engine.step([SequenceInput("b", 0, text[:2], 0)])
    chain = engine.step([SequenceInput("b", 2, text[2:], 5), SequenceInput("c", 0, text[:2], 1)])[0]
    assert torch.equal(torch.cat(alone[2:]), chain)


@interpreted
@pytest.mark.parametrize("engines", ["llama"], indirect=True)
def test_nan_logits_give_an_index_in_the_vocabulary(engines: tuple[GraphEngine, GraphEngine]) -> None:
    """Logits that are no numbers must not become an index outside of the embedding."""
    triton, plain = engines
    triton.choose([SequenceInput("a", 0, [1, 2], 1)], [GREEDY])
    program = next(iter(triton.runner.programs.values()))
    logits = torch.full_like(program.buffers.logits, float("nan"))
    stripes = Stripes.make(1, plain.vocab_size, torch.device("cpu"))
    tokens = torch.full((1,), -1)
    triton.runner.kernels.stripes(logits, program.tables, None, stripes)
    assert isinstance(plain.runner.kernels, TorchKernels)
    assert (stripes.token < plain.vocab_size).all()
    triton.runner.kernels.pick(stripes, tokens)
    assert 0 <= int(tokens) < plain.vocab_size


@interpreted
@pytest.mark.parametrize("engines", ["llama"], indirect=True)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_with_a_bad_best_are_marked(engines: tuple[GraphEngine, GraphEngine], bad: float) -> None:
    for engine in engines:
        engine.choose([SequenceInput("a", 0, [1, 2], 2)], [GREEDY])
        program, kernels = next(iter(engine.runner.programs.values())), engine.runner.kernels
        logits = torch.zeros_like(program.buffers.logits)
        logits[0, 5] = 1.0
        logits[1, :] = bad
        if bad != float("-inf"):
            logits[1, 1:] = 2.0  # one bad score of a row is enough
        with torch.inference_mode():
            kernels.stripes(logits, program.tables, None, program.buffers.stripes)
            kernels.pick(program.buffers.stripes, program.buffers.tokens, marks_bad=True)
        assert program.buffers.tokens.tolist() == [5, -1]
