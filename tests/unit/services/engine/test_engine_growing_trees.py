"""Trees that grow node by node, from any place of the chain, and move their root: against plain forwards."""

import random

import pytest
import torch

from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from tests.support.engine_helpers import path_tokens, plain_logits, plain_model, random_tokens, tiny_model

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
