"""The captured path, run eagerly: against plain transformers forwards, and proposals against single steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.engine import loader as loading
from services.engine.core.batch import GREEDY, GumbelDraw
from services.engine.core.errors import CacheGapError, UnsupportedModelError
from services.engine.core.model import load_model
from services.engine.cuda.runner import Capture, GraphRunner
from services.engine.cuda.tables import MAX_CAPTURED_ROWS, MAX_TILED_ROWS
from services.engine.cuda.weights import has_graph_path
from services.engine.engine import SequenceInput
from services.engine.graph_engine import GraphEngine
from services.engine.hf.runner import TransformersRunner
from services.engine.loader import load_engine
from services.engine.sampling.noise import Noise
from tests.support.engine_helpers import CheckedEngine, path_tokens, plain_model, random_tokens, tiny_model

TOLERANCE = 1e-4
TREE = (-1, -1, 0, 0, 1, 3)
GUMBEL_DRAWS = (GumbelDraw(7), GumbelDraw(2**64 - 3, sample_index=2, temperature=0.7))


def graph_engine(arch: str, path: Path) -> tuple[GraphEngine, Path]:
    directory = tiny_model(arch, path, head_dim=16)
    return GraphEngine.build(load_model(str(directory), device="cpu")), directory


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> GraphEngine:
    return graph_engine("llama", tmp_path_factory.mktemp("models"))[0]


@pytest.mark.parametrize("arch", ["llama", "llama-yarn", "mistral-full", "qwen2", "qwen3"])
def test_steps_of_every_kind_match_plain_forward(arch: str, tmp_path: Path) -> None:
    built, directory = graph_engine(arch, tmp_path)
    run = CheckedEngine(built, plain_model(directory))
    run.step(SequenceInput("a", 0, random_tokens(70, 1), 3), SequenceInput("b", 0, random_tokens(3, 2), 1))
    run.step(SequenceInput("a", 70, random_tokens(1, 3), 1), SequenceInput("c", 0, random_tokens(2, 4), 0))
    # Rollback, ragged chains, and a tree together with a chain.
    run.step(SequenceInput("a", 60, random_tokens(9, 5), 9), SequenceInput("b", 2, random_tokens(4, 6), 4))
    run.step(
        SequenceInput("a", 65, random_tokens(8, 7), 7, TREE), SequenceInput("b", 6, random_tokens(1, 8), 1)
    )
    built.keep_path("a", 67, [0, 3, 5])
    run.step(SequenceInput("a", 70, random_tokens(2, 9), 2))
    built.fork("a", "d", 40)
    run.step(SequenceInput("d", 40, random_tokens(2, 10), 2))
    assert run.worst <= TOLERANCE
    with pytest.raises(CacheGapError):
        run.step(SequenceInput("a", 90, [1], 1))


def test_tree_that_grows_matches_plain_forward(tmp_path: Path) -> None:
    """Nodes join a cached tree, and one starts from an earlier place of the chain."""
    built, directory = graph_engine("llama", tmp_path)
    plain = plain_model(directory)
    text, nodes = random_tokens(20, 1), random_tokens(6, 2)
    built.step([SequenceInput("a", 0, text, 0)])
    built.step([SequenceInput("a", 20, nodes[:3], 3, (-1, -1, 0))])
    got = built.step([SequenceInput("a", 20, nodes[3:], 3, (2, -3, 1), num_kept=3)])[0]
    parents = (-1, -1, 0, 2, -3, 1)
    for row, node in enumerate((3, 4, 5)):
        prefix = text[:18] if node == 4 else text
        path = [nodes[4]] if node == 4 else path_tokens(nodes, parents, node)
        expected = plain(torch.tensor([prefix + path])).logits[0, -1]
        assert (got[row] - expected).abs().max() <= TOLERANCE


def test_tree_of_more_than_64_nodes_matches_plain_forward(tmp_path: Path) -> None:
    built, directory = graph_engine("llama", tmp_path)
    run = CheckedEngine(built, plain_model(directory))
    parents = tuple(max(-1, node - 7) for node in range(70))
    run.step(SequenceInput("a", 0, random_tokens(72, 1), 3, parents))
    assert run.worst <= TOLERANCE


@pytest.mark.parametrize(
    ("arch", "settings"),
    [("mistral", {}), ("llama-bias", {}), ("gpt2", {}), ("llama", {"head_dim": 8})],
    ids=["sliding window", "biases in the MLP", "another architecture", "short heads"],
)
def test_build_uncovered_model_is_refused(arch: str, settings: dict[str, int], tmp_path: Path) -> None:
    loaded = load_model(str(tiny_model(arch, tmp_path, **settings)), device="cpu")
    with pytest.raises(UnsupportedModelError):
        GraphEngine.build(loaded)


def test_build_shares_the_module_weights(tmp_path: Path) -> None:
    """The transformers model stays usable, and no weight is held twice."""
    directory = tiny_model("qwen2", tmp_path, head_dim=16)
    loaded = load_model(str(directory), device="cpu")
    text = torch.tensor([random_tokens(9, 1)])
    before = loaded.module(text).logits
    model = GraphEngine.build(loaded).runner.model
    assert torch.equal(loaded.module(text).logits, before)
    projection = loaded.module.model.layers[1].self_attn.k_proj.weight
    assert projection.untyped_storage().data_ptr() == model.layers[1].qkv.untyped_storage().data_ptr()


def test_choose_is_the_gumbel_max_draw(engine: GraphEngine) -> None:
    """The draw is that of the verifier: the same noise at the same absolute positions."""
    text = random_tokens(12, 1)
    feeds = [
        SequenceInput("a", 0, text, 5),
        SequenceInput("b", 0, text[:4], 2),
        SequenceInput("c", 0, text[:3], 1),
    ]
    chosen = engine.choose(feeds, [*GUMBEL_DRAWS, GREEDY])
    logits = engine.step(feeds)
    for index, gumbel_draw in enumerate(GUMBEL_DRAWS):
        noise = Noise(gumbel_draw.seed, gumbel_draw.sample_index, engine.vocab_size)
        first = len(feeds[index].token_ids) - feeds[index].num_logits + 1
        scores = logits[index] / gumbel_draw.temperature + noise.gumbel(first, feeds[index].num_logits)
        assert chosen[index] == scores.argmax(-1).tolist()
    assert chosen[2] == logits[2].argmax(-1).tolist()


@pytest.mark.parametrize("gumbel_draws", [GUMBEL_DRAWS, (GREEDY, GREEDY)], ids=["sampled", "greedy"])
def test_drafts_equal_single_steps(engine: GraphEngine, gumbel_draws: tuple[GumbelDraw, ...]) -> None:
    """From feeds of one token and of several, and across the border of a page, after 64 slots."""
    text, lengths = random_tokens(62, 3), {"a": 61, "b": 2, "c": 7}
    draws = [*gumbel_draws, gumbel_draws[0]]
    engine.step([SequenceInput(name, 0, text[: length - 1], 0) for name, length in lengths.items()])
    feeds = [
        SequenceInput("a", 60, text[60:62], 1),
        SequenceInput("b", 1, [5], 1),
        SequenceInput("c", 6, text[6:9], 1),
    ]
    drafts = engine.draft(feeds, draws, 5, num_guesses=3)
    assert [engine.length(name) for name in "abc"] == [66, 6, 13]
    assert list(engine.tokens("a")) == [*text, *(draft.token_id for draft in drafts[0][:-1])]
    expected: list[list[int]] = [[], [], []]
    for _ in range(5):
        for tokens, chosen in zip(expected, engine.choose(feeds, draws), strict=True):
            tokens.extend(chosen)
        feeds = [
            SequenceInput(feed.session_id, feed.start + len(feed.token_ids), tokens[-1:], 1)
            for feed, tokens in zip(feeds, expected, strict=True)
        ]
    assert [[draft.token_id for draft in own] for own in drafts] == expected
    # What follows reads the cached tokens.
    after = engine.step([SequenceInput("a", 66, expected[0][-1:], 1)])[0]
    engine.release("again")
    again = engine.step([SequenceInput("again", 0, [*text, *expected[0]], 1)])[0]
    assert (after - again).abs().max() <= TOLERANCE


def test_guesses_are_the_shares_of_the_scores(engine: GraphEngine) -> None:
    """Of all rows that are wanted, those of a tree as well; at most one token of four (a stripe here)."""
    draw = GumbelDraw(11, temperature=0.8, sharpness=1.7)
    feeds = [
        SequenceInput("a", 0, random_tokens(9, 1), 5, (-1, -1, 0, 1)),
        SequenceInput("b", 0, random_tokens(4, 2), 2),
    ]
    found = engine.draft(feeds, [draw, GREEDY], num_guesses=4)
    logits = engine.step(feeds)
    assert [len(own) for own in found] == [5, 2]
    noise = Noise(draw.seed, draw.sample_index, engine.vocab_size)
    positions = (5, 6, 6, 7, 7)  # of the tokens drawn after the chain's last token and each node
    rows = [logits[0][row] / 0.8 + noise.gumbel(at, 1)[0] for row, at in enumerate(positions)]
    for own, scores, sharpness in (
        *((draft, row, 1.7) for draft, row in zip(found[0], rows, strict=True)),
        *((draft, row, 1.0) for draft, row in zip(found[1], logits[1], strict=True)),
    ):
        shares = (sharpness * scores.double()).softmax(-1)
        assert own.token_id == own.guesses[0][0] == int(scores.argmax())
        assert [share for _, share in own.guesses] == pytest.approx(
            [shares[token].item() for token, _ in own.guesses], rel=1e-4
        )
        best = [int(stripe.argmax()) + 4 * at for at, stripe in enumerate(scores.split(4))]
        best.sort(key=lambda token: float(scores[token]), reverse=True)
        assert [token for token, _ in own.guesses] == best[:4]


def test_drafts_of_wrong_feeds_are_refused(engine: GraphEngine) -> None:
    engine.step([SequenceInput("a", 0, random_tokens(125, 1), 0)])
    with pytest.raises(ValueError, match="reach position 128"):
        engine.draft([SequenceInput("a", 125, [1], 1)], GUMBEL_DRAWS[:1], 4, num_guesses=1)
    with pytest.raises(ValueError, match="count: got 0, allowed: at least 1"):
        engine.draft([SequenceInput("a", 125, [1], 1)], GUMBEL_DRAWS[:1], 0, num_guesses=1)
    for wrong in (SequenceInput("a", 125, [1, 2], 2), SequenceInput("a", 125, [1], 1, (-2,))):
        with pytest.raises(ValueError, match="logits of its last token"):
            engine.draft([wrong], GUMBEL_DRAWS[:1], 2, num_guesses=1)
    assert engine.length("a") == 125


def test_drafts_go_on_after_scores_that_are_no_numbers(tmp_path: Path) -> None:
    """Some token of the vocabulary is fed: an index outside it would end the process on a device."""
    loaded = load_model(str(tiny_model("llama", tmp_path, head_dim=16)), device="cpu")
    built = GraphEngine.build(loaded)
    with torch.no_grad():
        loaded.module.lm_head.weight.fill_(float("nan"))
    (found,) = built.draft([SequenceInput("a", 0, [3], 1)], [GREEDY], 3, num_guesses=2)
    assert [draft.token_id for draft in found] == [0, 0, 0]
    assert all(share == 0 for draft in found for _, share in draft.guesses)


def test_steps_of_a_bucket_are_one_program(engine: GraphEngine) -> None:
    """Whatever the sessions, their lengths, trees and wanted rows; long chunks and large trees have none."""
    engine.runner.programs.clear()
    steps = [
        [SequenceInput("p", 0, random_tokens(6, 1), 6)],
        [SequenceInput("p", 6, random_tokens(5, 2), 3), SequenceInput("q", 0, [1], 1)],
        [SequenceInput("p", 11, random_tokens(6, 3), 4, (-1, -1, 0, 2))],
        [SequenceInput(name, 0, [1], 1) for name in "stuvwx"],
    ]
    for feeds in steps:
        engine.step(feeds)
    assert len(engine.runner.programs) == 1
    engine.step([SequenceInput("y", 0, random_tokens(MAX_TILED_ROWS + 1, 4), 1)])
    assert len(engine.runner.programs) == 1


def test_captured_buckets_are_bounded_in_number(engine: GraphEngine) -> None:
    buckets = engine.runner.buckets
    found = {buckets.captured(rows) for rows in range(1, MAX_CAPTURED_ROWS + 1)}
    assert found == set(buckets.all())
    assert len(found) <= 32
    assert all(buckets.captured(rows).rows >= rows for rows in range(1, MAX_CAPTURED_ROWS + 1))


def test_capture_runs_once_then_captures_and_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of things, on stand-ins for CUDA's graph."""
    log: list[str] = []

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def graph(captured: Graph, pool: object, capture_error_mode: str) -> Iterator[None]:
        log.append(f"{capture_error_mode} capture in {pool}")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = Capture(lambda: log.append("work"), capturable=True, pool="pool")
    for _ in range(3):
        capture.run()
    assert log == ["work", "thread_local capture in pool", "work", "replay", "replay"]
    log.clear()
    eager = Capture(lambda: log.append("work"), capturable=False, pool=None)
    for _ in range(3):
        eager.run()
    assert log == ["work"] * 3


def test_steps_share_their_buffers_and_leave_earlier_logits_alone(engine: GraphEngine) -> None:
    runner = engine.runner
    few, many = (runner.program(runner.buckets.captured(rows)) for rows in (1, 9))
    assert few.buffers.logits.data_ptr() == many.buffers.logits.data_ptr()
    assert few.tables.flat.data_ptr() == many.tables.flat.data_ptr()
    (first,) = engine.step([SequenceInput("share-a", 0, random_tokens(9, 1), 9)])
    kept = first.clone()
    engine.step([SequenceInput("share-b", 0, random_tokens(4, 2), 4)])
    assert torch.equal(first, kept)


def test_engine_load_uses_the_captured_path_if_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `load_engine` does on a CUDA device, its check against the model's own forward included."""
    monkeypatch.setattr(loading, "native_obstacle", lambda *_: "on a device")
    monkeypatch.setattr(loading, "prefers_graphs", has_graph_path)
    directory = tiny_model("qwen3", tmp_path, head_dim=16)
    built = load_engine(str(directory), device="cpu")
    assert isinstance(built.runner, GraphRunner)
    run = CheckedEngine(built, plain_model(directory))
    run.step(
        SequenceInput("a", 0, random_tokens(9, 1), 3),
        SequenceInput("b", 0, random_tokens(4, 2), 3, (-1, -1, 0)),
    )
    assert run.worst <= TOLERANCE
    other = load_engine(str(tiny_model("gpt2", tmp_path)), device="cpu")
    assert isinstance(other.runner, TransformersRunner)


def test_steps_in_bfloat16_stay_close_to_plain_forward(tmp_path: Path) -> None:
    directory = tiny_model("llama", tmp_path, head_dim=16, bfloat16=True)
    built = GraphEngine.build(load_model(str(directory), device="cpu", dtype="bfloat16"))
    text = random_tokens(40, 1)
    got = torch.cat([built.step([SequenceInput("a", i, text[i : i + 10], 10)])[0] for i in range(0, 40, 10)])
    expected = plain_model(directory)(torch.tensor([text])).logits[0]
    assert (got - expected).abs().mean() <= 0.02 * expected.abs().mean()


def test_engine_on_a_cpu_uses_the_cpu_kernel(tmp_path: Path) -> None:
    """Captured steps are for CUDA devices; the CPU has its own kernels."""
    engine = load_engine(str(tiny_model("llama", tmp_path)), device="cpu")
    assert type(engine.runner).__name__ == "NativeRunner"
