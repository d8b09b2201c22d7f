"""How much of the shared noise a drafter should add: acceptance of its first token, by the noise's scale.

    python -m benchmarks.draft_noise --target build/models/smollm2 \
        --drafts benchmarks/drafters/smollm2 --heads benchmarks/heads/smollm2

With coupled verification a token of the target is argmax(log p + g). A drafter that proposes
argmax(log q + s g) is accepted with a probability that has a closed form: with s = 1 that of Gumbel coupling,
with s = 0 (a greedy draft, as vLLM's) the probability p of the draft's likeliest token, in between that of
coupling with q^(1/s). Every s is lossless, as the target's token does not depend on the proposal. Texts are
the target's own at each temperature.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.prompts import load_tasks
from benchmarks.provenance import make_parser, settings_of, write_result
from gammaray.demo_pair import resolve_model
from orchestrator.text.tokenizer import Tokenizer
from services.engine.core.batch import SequenceInput
from services.engine.engine import Engine
from services.engine.loader import load_engine
from services.heads.loading import load_head
from services.heads.runner import head_engine

SCALES = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2)
BOUNDS = (0.5, 0.8, 0.95)
"""Between the classes of positions by the overlap 1 - TV of p and q."""

WINNERS, TOKENS = 64, 1024
"""Likeliest tokens of p that may be accepted, and of p and q that are compared one by one; what the others
could add is below the probability that is left."""

_SESSION = "text"

Rows = Callable[[Sequence[int], int], Tensor]
"""Logits of the tokens from a position on, [tokens, vocab_size], given those before each."""


def coupled(p: Tensor, q: Tensor) -> float:
    """Return the probability that p and q draw one token with the same Gumbel noise.

    That is sum_j 1 / sum_i max(p_i / p_j, q_i / q_j).

    Args:
        p: The target's probabilities, [vocab_size].
        q: The drafter's.
    """
    most = min(TOKENS, len(p))
    ids = torch.cat([p.topk(most).indices, q.topk(most).indices]).unique()
    p, q = p[ids].double().clamp_min(1e-30), q[ids].double().clamp_min(1e-30)
    p_rest, q_rest = (1.0 - float(part.sum()) for part in (p, q))
    winners = p.topk(min(WINNERS, len(p))).indices
    of_p, of_q = p[winners, None], q[winners, None]
    larger = (
        torch.maximum(p / of_p, q / of_q).sum(-1) + (max(0.0, p_rest) / of_p + max(0.0, q_rest) / of_q)[:, 0]
    )
    return float((1.0 / larger).sum())


def accepted(target: Tensor, draft: Tensor, scale: float, temperature: float) -> float:
    """Return the probability, from both logits, that the draft with noise times `scale` is accepted."""
    p = (target / temperature).softmax(-1)
    if scale == 0:
        return float(p[draft.argmax()])
    return coupled(p, (draft / (temperature * scale)).softmax(-1))


def text_of(
    engine: Engine, prompt: Sequence[int], temperature: float, count: int, stops: Sequence[int]
) -> list[int]:
    """Return the prompt with up to `count` tokens that the target draws."""
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count and (start == 0 or tokens[-1] not in stops):
        (logits,) = engine.step([SequenceInput(_SESSION, start, tokens[start:], 1)])
        start = len(tokens)
        tokens.append(int(torch.multinomial((logits[0] / temperature).softmax(-1), 1)))
    engine.forget(_SESSION)
    return tokens


def model_rows(engine: Engine) -> Rows:
    """Return what computes the logits of a model that reads tokens alone."""

    def rows(tokens: Sequence[int], first: int) -> Tensor:
        (logits,) = engine.step([SequenceInput(_SESSION, 0, tokens[:-1], len(tokens) - first)])
        engine.forget(_SESSION)
        return logits

    return rows


def head_rows(target: Engine, head: Engine) -> Rows:
    """Return what computes the logits of a head of `target`."""

    def rows(tokens: Sequence[int], first: int) -> Tensor:
        target.tap(head.target_taps)
        target.step([SequenceInput(_SESSION, 0, tokens[:-2], 1)])
        features = head.fuse(target.taps[0])
        target.tap(())
        target.forget(_SESSION)
        head.skip(_SESSION, tokens[:1])
        feed = SequenceInput(_SESSION, 1, tokens[1:-1], len(tokens) - first, features=features)
        (logits,) = head.step([feed])
        head.forget(_SESSION)
        return logits

    return rows


def drafters(options: Any, target: Engine, model: str) -> Iterator[tuple[str, Rows]]:
    """Yield each drafter's name and what computes its logits; one is loaded at a time."""
    for name in options.drafts:
        yield name, model_rows(load_engine(name, draft_for=model, weights=options.draft_weights))
    for name in options.heads:
        head, ids = load_head(name, model)
        head.to("cpu", torch.float32)
        sizes: dict[str, Any] = {"max_context": target.max_context, "weights": options.draft_weights}
        yield name, head_rows(target, head_engine(head, ids, name=name, uses_kernel=True, **sizes))


def measured(positions: Sequence[tuple[float, list[float]]]) -> dict[str, Any]:
    """Return the mean acceptance by scale, of all positions and by overlap."""
    edges = (0.0, *BOUNDS, 1.01)
    classes = []
    for low, high in pairwise(edges):
        inside = [values for overlap, values in positions if low <= overlap < high]
        means = [round(statistics.fmean(column), 4) for column in zip(*inside, strict=True)]
        classes.append({"from": low, "below": high, "positions": len(inside), "accepted": means})
    every = [round(statistics.fmean(column), 4) for column in zip(*(v for _, v in positions), strict=True)]
    return {"positions": len(positions), "accepted": every, "by_overlap": classes}


def run(options: Any) -> dict[str, Any]:
    """Return the result, JSON-ready."""
    model = resolve_model(options.target, "target")
    tokenizer, target = Tokenizer(model), load_engine(model)
    torch.manual_seed(0)
    texts: list[tuple[float, list[int], int]] = []
    for task in load_tasks(options.categories.split(","), options.prompts):
        prompt = tokenizer.encode(tokenizer.render_chat(task.messages))
        for temperature in options.temperatures:
            text = text_of(target, prompt, temperature, options.tokens, tokenizer.eos_token_ids)
            texts.append((temperature, text, len(prompt)))
    wanted = [model_rows(target)(text, first) for _, text, first in texts]
    points = []
    for name, rows in drafters(options, target, model):
        drafted = [rows(text, first) for _, text, first in texts]
        for temperature in options.temperatures:
            positions = []
            for (of_text, _, _), p_rows, q_rows in zip(texts, wanted, drafted, strict=True):
                for p, q in zip(p_rows, q_rows, strict=True) if of_text == temperature else ():
                    pair = [(part / temperature).softmax(-1) for part in (p, q)]
                    overlap = float(torch.minimum(*pair).sum())
                    positions.append((overlap, [accepted(p, q, scale, temperature) for scale in SCALES]))
            points.append({"drafter": name, "temperature": temperature} | measured(positions))
    return {"settings": settings_of(options), "scales": SCALES, "points": points}


def show(result: dict[str, Any]) -> None:
    """Print acceptance by scale, of all positions and by overlap."""
    table = Table("drafter", "T", "overlap", "positions", *map(str, result["scales"]))
    for point in result["points"]:
        rows = [
            ("all", point),
            *((f"{part['from']} to {part['below']}", part) for part in point["by_overlap"]),
        ]
        for name, part in rows:
            shares = [f"{share:.3f}" for share in part["accepted"]]
            table.add_row(point["drafter"], str(point["temperature"]), name, str(part["positions"]), *shares)
    Console(width=160).print(table)


def main() -> None:
    """Command line of this module."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", required=True, help="directory or hub name")
    parser.add_argument("--drafts", nargs="*", default=[], help="draft models")
    parser.add_argument("--heads", nargs="*", default=[])
    parser.add_argument("--draft-weights", choices=("auto", "int8"), default="auto")
    parser.add_argument("--categories", default="chat,code")
    parser.add_argument("--prompts", type=int, default=4, help="of each category")
    parser.add_argument("--tokens", type=int, default=64, help="of each text")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    options = parser.parse_args()
    result = run(options)
    show(result)
    print(f"written: {write_result('draft-noise', result, options.out)}")


if __name__ == "__main__":
    main()
