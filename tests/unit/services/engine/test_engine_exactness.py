"""The engine's logits and hidden states against the model's own plain forward, for every architecture."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.engine.native.runner import NativeRunner
from tests.support.engine_helpers import (
    LEAN,
    SUPPORTED,
    CheckedEngine,
    flash_engine,
    path_tokens,
    plain_logits,
    plain_model,
    random_tokens,
    tiny_model,
)

TOLERANCE = 1e-4
TAP_TOLERANCE = 1e-5
LAYERS = (2, 3, 0, 1, 2)
"""Layers whose states are compared: in any order, the last one and one of them twice."""

# Two roots, a chain below one, siblings with equal positions, a leaf deeper than the window of 8.
TREE = (-1, -1, 0, 0, 1, 2, 4, 5, 6, 8, 9, 10, 11)
PATHS = [
    *((arch, path) for path in ("transformers", "flash") for arch in SUPPORTED),
    *((arch, "native") for arch in LEAN),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A function of an architecture that returns its saved model, made on first use."""
    root = tmp_path_factory.mktemp("models")
    # Large logits: soft-caps and softmaxes are far from linear.
    return cache(lambda arch: tiny_model(arch, root, gain=2.0 if arch.startswith("gemma") else 1.0))


def engine_of(directory: Path, path: str, dtype: str = "float32") -> Engine:
    if path == "flash":
        return flash_engine(directory, dtype=dtype)
    return load_engine(str(directory), engine=path, dtype=dtype)


@pytest.mark.parametrize(("arch", "path"), PATHS)
def test_steps_of_several_sessions_match_plain_forwards(directories, arch, path):
    run = CheckedEngine(engine_of(directories(arch), path), plain_model(directories(arch)), LAYERS)
    assert isinstance(run.engine.runner, NativeRunner) == (path == "native")
    text, tree = random_tokens(128, 1), random_tokens(len(TREE), 4)
    run.step(
        SequenceInput("a", 0, text[:70], 3),
        SequenceInput("b", 0, text[40:47], 1),
        SequenceInput("c", 0, text[50:73], 0),
    )
    run.step(
        *[SequenceInput(name, n, random_tokens(1, n), 1) for name, n in (("a", 70), ("b", 7), ("c", 23))]
    )
    # Ragged rows, a rollback, a tree and a new session.
    run.step(
        SequenceInput("c", 24, [5, *tree], len(TREE) + 1, TREE),
        SequenceInput("d", 0, text[:2], 2),
        SequenceInput("a", 71, random_tokens(4, 3), 4),
        SequenceInput("b", 4, random_tokens(9, 5), 9),
    )
    run.engine.keep_path("c", 25, [0, 2, 5, 7])
    assert run.engine.tokens("c")[24:] == [5, tree[0], tree[2], tree[5], tree[7]]
    run.engine.fork("c", "e", 27)
    # A chunk that begins behind cached tokens, with others.
    run.step(
        SequenceInput("d", 2, random_tokens(70, 6), 5),
        SequenceInput("c", 29, random_tokens(3, 7), 3),
        SequenceInput("e", 27, random_tokens(6, 8), 4, (-1, -1, 0)),
    )
    # Nodes that join the cached tree, one of them after an earlier token of the chain.
    run.step(
        SequenceInput("e", 30, random_tokens(3, 6), 3, (2, -3, 1), num_kept=3),
        SequenceInput("b", 13, random_tokens(2, 3), 1),
    )
    run.step(
        SequenceInput("e", 30, random_tokens(2, 4), 2, (5, 3), num_kept=6),
        SequenceInput("b", 15, random_tokens(2, 5), 1),
    )
    run.step(*[SequenceInput(s, run.engine.length(s), random_tokens(5, 9), 5) for s in "abcde"])
    run.step(SequenceInput("d", 20, random_tokens(6, 2), 6))
    assert run.worst <= TOLERANCE
    assert run.worst_tap <= TAP_TOLERANCE


@pytest.mark.parametrize("path", ["transformers", "flash"])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_bfloat16_stays_within_its_rounding(directories, arch, path):
    engine = engine_of(directories(arch), path, dtype="bfloat16")
    text = random_tokens(30, 1)
    feeds = [SequenceInput("a", 0, text[:21], 21), SequenceInput("b", 0, text[:9], 1)]
    got = torch.cat([engine.step(feeds)[0], engine.step([SequenceInput("a", 21, text[21:], 9)])[0]])
    expected = plain_logits(plain_model(directories(arch)).to(torch.bfloat16), text)
    assert got.dtype == torch.float32
    # Experts may be chosen differently within rounding: compare means.
    assert (got - expected).abs().mean() <= 0.05 * expected.abs().mean()


@pytest.mark.parametrize(
    "options", [{"engine": "native"}, {"engine": "transformers"}, {"deterministic": True}]
)
def test_logits_have_the_same_bits_with_taps(options, directories):
    tapped, plain = (load_engine(str(directories("llama")), **options) for _ in range(2))
    tapped.tap(LAYERS)
    text = random_tokens(60, 1)
    for feeds in (
        [SequenceInput("a", 0, text[:40], 40), SequenceInput("b", 0, text[:5], 1)],
        [SequenceInput("a", 40, text[40:41], 1)],
        [SequenceInput("a", 41, text[41:51], 10, TREE[:10]), SequenceInput("b", 5, text[5:9], 0)],
    ):
        for got, expected in zip(tapped.step(feeds), plain.step(feeds), strict=True):
            assert torch.equal(got, expected)
        assert len(tapped.taps) == len(feeds)
        assert plain.taps == []
    tapped.tap([])
    feed = [SequenceInput("b", 9, text[:3], 3)]
    assert torch.equal(tapped.step(feed)[0], plain.step(feed)[0])
    assert tapped.taps == []


ARCHS = ["llama", "mistral", "qwen3", "gemma3", "gpt2", "gpt_oss", "deepseek_v3"]
CONTEXT = random_tokens(70, 1)


class Growing:
    """One session's tree and a plain list of its nodes, which is the reference."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.chain = list(CONTEXT)
        self.nodes: list[tuple[int, int]] = []  # token, parent: a node, or from the chain's end back
        engine.step([SequenceInput("s", 0, self.chain, 1)])

    def path(self, node: int) -> list[int]:
        tokens, parents = zip(*self.nodes, strict=True)
        return path_tokens(self.chain, tokens, parents, node)

    def grow(self, count: int, other: SequenceInput | None = None) -> list[tuple[list[int], torch.Tensor]]:
        """Feed some nodes below any others; return their paths and logits."""
        num_kept = len(self.nodes)
        for _ in range(count):
            self.nodes.append((self.rng.randrange(97), self.rng.randrange(-4, len(self.nodes))))
        new = self.nodes[num_kept:]
        feed = SequenceInput(
            "s", len(self.chain), [token for token, _ in new], count, [parent for _, parent in new], num_kept
        )
        logits = self.engine.step([feed] if other is None else [other, feed])[-1]
        assert self.engine.num_nodes("s") == len(self.nodes)
        return [(self.path(num_kept + row), logits[row]) for row in range(count)]

    def move_root(self) -> None:
        """Let a random path become chain and some of what hangs on it stay."""
        path: list[int] = []
        at = self.rng.randrange(-4, 0)
        while children := [i for i, (_, parent) in enumerate(self.nodes) if parent == at]:
            if path and self.rng.random() < 0.4:
                break
            at = self.rng.choice(children)
            path.append(at)
        base = len(self.chain) + 1 + (self.nodes[path[0]][1] if path else -1)
        chain = [*self.chain[:base], *(self.nodes[node][0] for node in path)]
        places = {node: base + index - len(chain) for index, node in enumerate(path)}
        keep: list[int] = []
        for node, (_, parent) in enumerate(self.nodes):
            if node in path or self.rng.random() < 0.2:
                continue
            in_chain = parent < 0 and len(self.chain) + parent < base
            if in_chain or parent in places:
                places[node] = len(keep)
                keep.append(node)
        parents = [
            places[parent] if parent >= 0 else len(self.chain) + parent - len(chain)
            for parent in (self.nodes[node][1] for node in keep)
        ]
        self.engine.keep_path("s", base, path, keep)
        self.nodes = [(self.nodes[node][0], parent) for node, parent in zip(keep, parents, strict=True)]
        self.chain = chain
        assert list(self.engine.tokens("s")) == chain
        assert self.engine.num_nodes("s") == len(keep)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("arch", ARCHS)
def test_growing_tree_each_path_matches_its_plain_forward(root, arch):
    directory = tiny_model(arch, root, max_position_embeddings=256)
    plain = plain_model(directory)
    for choice in ("auto", "transformers"):
        growing, worst = Growing(load_engine(str(directory), engine=choice), seed=3), 0.0
        for turn in range(14):
            other = SequenceInput("t", 0, random_tokens(3 + turn, turn), 1) if turn % 3 == 0 else None
            for path, logits in growing.grow(growing.rng.randrange(1, 6), other):
                worst = max(worst, (plain_logits(plain, path)[-1] - logits).abs().max().item())
            if turn % 3 == 2:
                growing.move_root()
        assert worst <= 1e-4


def test_growing_tree_wrong_moves_are_refused(root):
    engine = load_engine(str(tiny_model("llama", root)))
    engine.step([SequenceInput("s", 0, [1, 2, 3], 1)])
    engine.step([SequenceInput("s", 3, [4, 5, 6], 3, [-2, 0, -1])])
    wrong = [
        (2, [1], []),
        (3, [0], []),
        (2, [0], [2]),
        (3, [2], [1]),
        (4, [2], []),
        (3, [3], []),
        (3, [2, 2], []),
    ]
    for base, path, keep in wrong:
        with pytest.raises(ValueError, match=r"base|path|parent"):
            engine.keep_path("s", base, path, keep)
    engine.keep_path("s", 2, [0], [1])
    assert list(engine.tokens("s")) == [1, 2, 4]
    with pytest.raises(ValueError, match="num_kept"):
        engine.step([SequenceInput("s", 2, [7], 1, [-1], 1)])
